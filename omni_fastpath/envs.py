"""Every environment variable of ours, in one place.

They are for A/B runs without touching a file and win over the deploy YAML. ``1 true on yes`` and ``0 false off no``,
whatever their case, are the booleans; anything else is refused, an empty value too. An unknown name is refused where
something asks for us, and only told otherwise.

``OMNI_FASTPATH=0``
    Everything off, nothing validated, no slot touched: the clean stock arm.
``OMNI_FASTPATH=1``
    What the YAML says if it switches anything on, else the default set.
``OMNI_FASTPATH_<PATCH>=1`` or ``0``
    That patch on, with the YAML's values or the defaults, even without a block; or off.
``OMNI_FASTPATH_<PATCH>__<KEY>=V``
    One value of a patch, read by its type; ``null`` where the type allows it. Switches nothing on.
``OMNI_FASTPATH_ON_UNSUPPORTED=warn`` or ``fail``
    As the key ``fastpath.on_unsupported``.

``_OMNI_FASTPATH_HANDOFF`` is not for people: it carries the parent's result to the stages it spawns (``handoff``).

Kubernetes puts the address of a Service named ``omni-fastpath`` or ``omni-fastpath-...`` into every pod of the
namespace, as ``OMNI_FASTPATH_SERVICE_HOST``, ``OMNI_FASTPATH_PORT_8091_TCP_ADDR`` and so on; Docker does the same for a
link. Those names are nobody's, except where one of them is a variable of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_fastpath import values
from omni_fastpath.declare import Patch
from omni_fastpath.master import BOOLEAN_WORDS, MASTER, NAMESPACE, ON_UNSUPPORTED, boolean, master_off
from omni_fastpath.patches import GONE
from omni_fastpath.values import ConfigError, refusal, shown

_ADDRESS = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.+)?)?)")
"""The names that Kubernetes makes of a Service; Docker makes the ``PORT`` ones of a link."""
_LINK_NAME = re.compile(r"(?P<link>.+)_NAME")
_LINK_VALUE = re.compile(r"/[^/]+/[^/]+")
"""What Docker gives ``<LINK>_NAME``: ``/container/alias``. ``<LINK>_ENV_*`` is that container's own environment."""

OnUnsupported = Literal["warn", "fail"]
ON_UNSUPPORTED_WORDS: tuple[OnUnsupported, ...] = ("warn", "fail")


@dataclass(frozen=True)
class EnvChoices:
    """What the environment says.

    Attributes:
        master: ``OMNI_FASTPATH``; None when it is not set.
        switches: Patch to on or off, for the patches that a variable switches.
        values: Patch to key to value, for the values that a variable sets.
        on_unsupported: ``OMNI_FASTPATH_ON_UNSUPPORTED``; None when it is not set.
        unknown: Names in our namespace that mean nothing, one line each. They refuse as soon as something is asked for.
    """

    master: bool | None = None
    switches: Mapping[str, bool] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    on_unsupported: OnUnsupported | None = None
    unknown: tuple[str, ...] = ()

    @property
    def switches_on(self) -> bool:
        """Whether the environment alone switches anything on."""
        return self.master is not False and (self.master is True or any(self.switches.values()))


def value_variable(patch: Patch, key: str) -> str:
    """The variable that sets one value of a patch."""
    return f"{patch.env}__{key.upper()}"


def documented(patches: Sequence[Patch]) -> dict[str, str]:
    """Every variable that may be set, with its meaning."""
    variables = {
        MASTER: "0: everything off, nothing validated; 1: what the YAML switches on, else the default set",
        ON_UNSUPPORTED: "warn or fail: what an unsupported or failed patch does to the start of the server",
    }
    for patch in patches:
        variables[patch.env] = f"1: {patch.name} on, with the YAML's values or the defaults; 0: off"
        for key in patch.options.model_fields:
            variables[value_variable(patch, key)] = f"fastpath.{patch.name}.{key}: {values.allowed(patch.options, key)}"
    return variables


def read(environ: Mapping[str, str], patches: Sequence[Patch], gone: Mapping[str, str] = GONE) -> EnvChoices:
    """Read and validate the variables of our namespace.

    Args:
        environ: The environment.
        patches: The declarations.
        gone: Patches of earlier versions by name, with what became of each.

    Raises:
        ConfigError: A word that is no boolean, a value that the patch's options refuse, or an unknown name beside a
            variable that switches something on.
    """
    if master_off(environ):
        return EnvChoices(master=False)
    ours = {name: environ[name] for name in said(environ, patches)}
    choices = EnvChoices(
        master=_switch(MASTER, ours),
        switches={patch.name: on for patch in patches if (on := _switch(patch.env, ours)) is not None},
        values={patch.name: found for patch in patches if (found := _values(patch, ours))},
        on_unsupported=_on_unsupported(ours),
        unknown=tuple(str(error) for error in _unknown(ours, patches, gone)),
    )
    if choices.switches_on:
        refuse_unknown(choices)
    return choices


def refuse_unknown(choices: EnvChoices) -> None:
    """For where something is asked for: a misspelt variable would be ignored in silence.

    Raises:
        ConfigError: There is an unknown name; the message has one line for each.
    """
    if choices.unknown:
        raise ConfigError("\n".join(choices.unknown))


def said(environ: Mapping[str, str], patches: Sequence[Patch]) -> list[str]:
    """The variables that somebody set for us, known or not, sorted; without those that Kubernetes and Docker make."""
    known = documented(patches)
    links = {
        match["link"]
        for name, value in environ.items()
        if (match := _LINK_NAME.fullmatch(name)) and _LINK_VALUE.fullmatch(value)
    }
    foreign = tuple(f"{link}_ENV_" for link in links)

    def is_nobodys(name: str) -> bool:
        return bool(_ADDRESS.fullmatch(name)) or name.removesuffix("_NAME") in links or name.startswith(foreign)

    in_namespace = (name for name in environ if name.startswith(NAMESPACE))
    return sorted(name for name in in_namespace if name in known or not is_nobodys(name))


def _unknown(ours: Mapping[str, str], patches: Sequence[Patch], gone: Mapping[str, str]) -> Iterator[ConfigError]:
    known = documented(patches)
    went = {f"{NAMESPACE}_{name.upper()}": words for name, words in gone.items()}
    for patch in patches:
        went |= {value_variable(patch, key): words for key, words in patch.options.gone.items()}
    for name in ours:
        if name not in known:
            of_its_patch = [other for other in known if "__" in name and other.startswith(f"{name.split('__')[0]}__")]
            switches = [other for other in known if "__" not in other]
            yield refusal(
                name,
                found="an unknown variable",
                allowed=", ".join(of_its_patch or [*switches, f"{NAMESPACE}_<PATCH>__<KEY>"]),
                nearest=values.nearest(name, known),
                gone=went.get(name) or went.get(name.split("__")[0]),
            )


def _switch(name: str, ours: Mapping[str, str]) -> bool | None:
    if name not in ours:
        return None
    on = boolean(ours[name])
    if on is None:
        raise refusal(name, found=shown(ours[name]), allowed=BOOLEAN_WORDS)
    return on


def _values(patch: Patch, ours: Mapping[str, str]) -> dict[str, Any]:
    found = {
        key: values.parse(patch.options, key, ours[variable])
        for key in patch.options.model_fields
        if (variable := value_variable(patch, key)) in ours
    }
    values.check(patch.options, found, lambda key: place(patch, key), complete=False)
    return found


def place(patch: Patch, key: str) -> str:
    """How a message names the variable of a value."""
    return f"{value_variable(patch, key)} (fastpath.{patch.name}.{key})"


def _on_unsupported(ours: Mapping[str, str]) -> OnUnsupported | None:
    if ON_UNSUPPORTED not in ours:
        return None
    word = ours[ON_UNSUPPORTED].strip().lower()
    for known in ON_UNSUPPORTED_WORDS:
        if word == known:
            return known
    raise refusal(
        ON_UNSUPPORTED,
        found=shown(ours[ON_UNSUPPORTED]),
        allowed=" or ".join(ON_UNSUPPORTED_WORDS),
        nearest=values.nearest(word, ON_UNSUPPORTED_WORDS),
    )
