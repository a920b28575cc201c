"""What a program shares with another that starts stock and fastpath in turn and shows them side by side."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from benchmarks.ab.serving import MeasureError
from benchmarks.rigs.arm import WrongArmError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PIPED_WIDTH = 200


def parser(program: str, description: str | None, **more: Any) -> argparse.ArgumentParser:
    """The command line of a program, ``python -m PROGRAM``, whose help shows the description as it is."""
    form = argparse.RawDescriptionHelpFormatter
    prog = f"python -m {program}"
    return argparse.ArgumentParser(prog, description=description, formatter_class=form, allow_abbrev=False, **more)


def guarded(name: str, run: Callable[[Console], int]) -> int:
    """Run a program's body with a console of its own, so that whatever ends it leaves no server behind.

    Args:
        name: What the program is called in a sentence.
        run: Its body: from the console to the exit status.

    Returns:
        The body's status; 1 where it could not measure, 130 where it was interrupted.
    """
    console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=_PIPED_WIDTH, no_color=True)
    # SIGINT too: where a shell started this in the background, Python leaves it ignored.
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, interrupted)
    try:
        return run(console)
    except SystemExit:
        console.print("Interrupted; the server is stopped and its files are removed.")
        return 130
    except (WrongArmError, MeasureError, subprocess.CalledProcessError) as error:
        console.print(f"{name} has no table to show.", style="bold red")
        detail = f"\n{error.output}" if isinstance(error, subprocess.CalledProcessError) else ""
        console.print(f"{type(error).__name__}: {error}{detail}", markup=False, highlight=False)
        return 1


def interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    """A handler of signals: leave through what stops the servers, undisturbed, so that none is left running."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def positive(text: str) -> int:
    """A number of one or more, of a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text}, allowed: 1 or more")
    return number
