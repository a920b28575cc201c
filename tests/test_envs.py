"""The environment variables: words, values by type, unknown names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import ByteSize, Field

from omni_fastpath import envs, values
from omni_fastpath.declare import Options, Patch, Process
from omni_fastpath.master import BOOLEAN_WORDS, master_off
from omni_fastpath.patches import PATCHES
from omni_fastpath.values import ConfigError


class Shape(str, enum.Enum):
    """An option that is an enumeration."""

    ROUND = "round"
    FLAT = "flat"


class DrumOptions(Options):
    """One field of each type that a variable can set."""

    count: int = Field(default=1, ge=-5, le=9)
    share: float = Field(default=0.1, ge=0, le=1)
    loud: bool = True
    name: str = "drum"
    order: Literal["up", "down"] = "up"
    limit: int | None = Field(default=8, ge=1)
    inner: Annotated[int, Field(ge=2)] | None = 4
    size: ByteSize | None = None
    shape: Shape = Shape.ROUND
    even: int = Field(default=2, multiple_of=2, gt=0)


def made_up(name: str, options: type[Options] = Options) -> Patch:
    """A declaration that no process installs."""
    return Patch(
        name=name,
        summary="",
        processes=frozenset({Process.SERVER}),
        rows=(),
        docs="",
        counters=(),
        options=options,
    )


MADE_UP = (made_up("drum", DrumOptions), made_up("drum_roll"))


@pytest.mark.parametrize("word", ["1", "true", "on", "yes", "TRUE", "On", " yes "])
def test_words_for_on(word: str) -> None:
    """These words switch on, whatever their case."""
    assert envs.read({"OMNI_FASTPATH_DRUM": word}, MADE_UP).switches == {"drum": True}


@pytest.mark.parametrize("word", ["0", "false", "off", "no", "FALSE", "Off", "nO"])
def test_words_for_off(word: str) -> None:
    """These words switch off, whatever their case; for the whole they end the reading."""
    assert envs.read({"OMNI_FASTPATH_DRUM": word}, MADE_UP).switches == {"drum": False}
    assert master_off({"OMNI_FASTPATH": word})
    assert envs.read({"OMNI_FASTPATH": word, "OMNI_FASTPATH_X": "?"}, MADE_UP) == envs.EnvChoices(master=False)


@pytest.mark.parametrize("word", ["", " ", "2", "y", "enable", "none", "null", "-1", "0.0"])
@pytest.mark.parametrize("name", ["OMNI_FASTPATH", "OMNI_FASTPATH_DRUM"])
def test_other_words_are_refused(name: str, word: str) -> None:
    """Anything else is refused by the variable's name, an empty value too; it is not taken for off."""
    assert not master_off({name: word})
    with pytest.raises(ConfigError) as refused:
        envs.read({name: word}, MADE_UP)
    for part in (f"{name}:", repr(word), BOOLEAN_WORDS):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "3", 3),
        ("count", "-3", -3),
        ("count", " 3 ", 3),
        ("count", "0_3", 3),
        ("share", "0.25", 0.25),
        ("share", "1", 1.0),
        ("share", "1e-3", 0.001),
        ("loud", "off", False),
        ("loud", "YES", True),
        ("loud", "1", True),
        ("name", "3", "3"),
        ("name", "null", "null"),
        ("name", "", ""),
        ("order", "down", "down"),
        ("limit", "3", 3),
        ("limit", "null", None),
        ("limit", "NULL", None),
        ("inner", "2", 2),
        ("size", "256MiB", "256MiB"),
        ("size", "256", 256),
        ("size", "null", None),
        ("shape", "flat", "flat"),
    ],
)
def test_values_are_read_by_their_type(key: str, text: str, value: Any) -> None:
    """The field's type decides what the text of a variable means."""
    choices = envs.read({f"OMNI_FASTPATH_DRUM__{key.upper()}": text}, MADE_UP)
    assert choices.values == {"drum": {key: value}}
    assert type(choices.values["drum"][key]) is type(value)
    assert not choices.switches_on


@pytest.mark.parametrize(
    ("key", "text", "allowed"),
    [
        ("count", "10", "an integer from -5 to 9"),
        ("count", "3.0", "an integer from -5 to 9"),
        ("count", "true", "an integer"),
        ("count", "null", "an integer"),
        ("count", "", "an integer"),
        ("count", "three", "an integer"),
        ("count", "1_", "an integer"),
        ("count", "_1", "an integer"),
        ("count", "1__0", "an integer"),
        ("count", "9" * 5000, "an integer"),
        ("name", "\udcff", "a string"),
        ("order", "\udcff", "'up' or 'down'"),
        ("share", "2", "a number from 0 to 1"),
        ("share", "nan", "a number"),
        ("share", "inf", "a number"),
        ("loud", "maybe", "true or false"),
        ("loud", "null", "true or false"),
        ("order", "left", "'up' or 'down'"),
        ("limit", "0", "an integer at least 1"),
        ("inner", "1", "an integer at least 2"),
        ("size", "lots", "a size in bytes such as 256MiB or null"),
        ("shape", "square", "'round' or 'flat'"),
        ("even", "3", "an integer above 0 and a multiple of 2"),
    ],
)
def test_wrong_values_are_refused(key: str, text: str, allowed: str) -> None:
    """A value that the field refuses names the variable, the key, what was found and what is allowed."""
    name = f"OMNI_FASTPATH_DRUM__{key.upper()}"
    with pytest.raises(ConfigError) as refused:
        envs.read({name: text}, MADE_UP)
    for part in (name, f"fastpath.drum.{key}", "found ", allowed):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("OMNI_FASTPATH_DRUMM", "OMNI_FASTPATH_DRUM"),
        ("OMNI_FASTPATH_drum", "OMNI_FASTPATH_DRUM"),
        ("OMNI_FASTPATH_DRUM_ROL", "OMNI_FASTPATH_DRUM_ROLL"),
        ("OMNI_FASTPATH_DRUM_COUNT", "OMNI_FASTPATH_DRUM__COUNT"),
        ("OMNI_FASTPATH_DRUM__COUNTS", "OMNI_FASTPATH_DRUM__COUNT"),
        ("OMNI_FASTPATH_DRUM__count", "OMNI_FASTPATH_DRUM__COUNT"),
        ("OMNI_FASTPATH_ON_UNSUPORTED", "OMNI_FASTPATH_ON_UNSUPPORTED"),
        ("OMNI_FASTPATHS", "OMNI_FASTPATH"),
        ("OMNI_FASTPATH_", "OMNI_FASTPATH"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    """A name in our namespace that means nothing says what was probably meant, and refuses beside a switch."""
    choices = envs.read({name: "1"}, MADE_UP)
    [line] = choices.unknown
    assert line.startswith(f"{name}: ")
    assert f"did you mean {nearest!r}?" in line
    assert choices == envs.EnvChoices(unknown=(line,))
    assert envs.read({name: "1", "OMNI_FASTPATH_DRUM": "0"}, MADE_UP).unknown == (line,)
    with pytest.raises(ConfigError) as refused:
        envs.read({name: "1", "OMNI_FASTPATH_DRUM": "1"}, MADE_UP)
    assert str(refused.value) == line


@pytest.mark.parametrize(
    "name",
    [
        "OMNI_FASTPATH_SERVICE_HOST",
        "OMNI_FASTPATH_SERVICE_PORT",
        "OMNI_FASTPATH_SERVICE_PORT_HTTP_ALT",
        "OMNI_FASTPATH_PORT",
        "OMNI_FASTPATH_PORT_8091_TCP",
        "OMNI_FASTPATH_PORT_8091_TCP_PROTO",
        "OMNI_FASTPATH_PORT_8091_UDP_ADDR",
        "OMNI_FASTPATH_PORT_8091_SCTP_PORT",
        "OMNI_FASTPATH_PORT_8091_TCP_PORT_START",
        "OMNI_FASTPATH_DRUM_SERVICE_HOST",
        "OMNI_FASTPATHS_PORT",
    ],
)
def test_addresses_of_services_are_nobodys(name: str) -> None:
    """What Kubernetes makes of a Service and Docker of a link is neither known nor unknown, whatever is asked for."""
    environ = {name: "tcp://10.0.0.7:8091"}
    assert envs.said(environ, MADE_UP) == []
    assert envs.read({**environ, "OMNI_FASTPATH": "1"}, MADE_UP) == envs.EnvChoices(master=True)


@pytest.mark.parametrize(
    "name", ["OMNI_FASTPATH_PORTS", "OMNI_FASTPATH_PORT_X", "OMNI_FASTPATH_SERVICE", "OMNI_FASTPATH_NAME"]
)
def test_other_names_are_unknown(name: str) -> None:
    """What only looks a little like an address is a name that somebody misspelt."""
    assert len(envs.read({name: "1"}, MADE_UP).unknown) == 1


def test_docker_link_of_our_name_is_nobodys() -> None:
    """A link's alias and the environment of the container behind it; both are told by the alias's value."""
    link = {"OMNI_FASTPATH_NAME": "/web/omni-fastpath", "OMNI_FASTPATH_ENV_OMNI_FASTPATH": "1"}
    assert envs.said(link, MADE_UP) == []
    assert envs.said({**link, "OMNI_FASTPATH_NAME": "web"}, MADE_UP) == sorted(link)


def test_known_names_win() -> None:
    """An option whose variable has the form of an address is ours."""

    class Ported(Options):
        port: int = 1

    patch = Patch(**{**vars(MADE_UP[0]), "name": "tap", "options": Ported})
    assert envs.read({"OMNI_FASTPATH_TAP__PORT": "7"}, (patch,)).values == {"tap": {"port": 7}}
    assert envs.said({"OMNI_FASTPATH_TAP__PORT": "7"}, (patch,)) == ["OMNI_FASTPATH_TAP__PORT"]


def test_names_outside_the_namespace_are_not_ours() -> None:
    """Other variables, the handoff among them, are not looked at."""
    environ = {"_OMNI_FASTPATH_HANDOFF": "x", "OMNI_SIMULATED_DEVICE": "x", "VLLM_PLUGINS": "x", "FASTPATH": "x"}
    assert envs.read(environ, MADE_UP) == envs.EnvChoices()


@pytest.mark.parametrize(("text", "word"), [("warn", "warn"), ("fail", "fail"), ("FAIL", "fail")])
def test_on_unsupported_words(text: str, word: str) -> None:
    """Both words are read, whatever their case."""
    assert envs.read({"OMNI_FASTPATH_ON_UNSUPPORTED": text}, MADE_UP).on_unsupported == word


@pytest.mark.parametrize("text", ["", "1", "fial", "ignore"])
def test_other_on_unsupported_words_are_refused(text: str) -> None:
    """Anything but ``warn`` and ``fail`` is refused."""
    with pytest.raises(ConfigError, match=r"OMNI_FASTPATH_ON_UNSUPPORTED: .*warn or fail"):
        envs.read({"OMNI_FASTPATH_ON_UNSUPPORTED": text}, MADE_UP)


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OMNI_FASTPATH": "1"}, True),
        ({"OMNI_FASTPATH": "0", "OMNI_FASTPATH_DRUM": "1"}, False),
        ({"OMNI_FASTPATH_DRUM": "1"}, True),
        ({"OMNI_FASTPATH_DRUM": "0"}, False),
        ({"OMNI_FASTPATH_DRUM__COUNT": "1", "OMNI_FASTPATH_ON_UNSUPPORTED": "fail"}, False),
    ],
)
def test_switches_on_means_the_environment_alone(environ: dict[str, str], on: bool) -> None:
    """Only the master or a patch's switch makes the environment ask for something by itself."""
    assert envs.read(environ, MADE_UP).switches_on is on


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_shipped_variables_take_their_defaults(patch: Patch) -> None:
    """Every shipped value can be written as text in its variable and reads back as its default."""
    defaults = patch.options().model_dump(mode="json")
    texts = {key: "null" if value is None else str(value) for key, value in defaults.items()}
    environ = {envs.value_variable(patch, key): text for key, text in texts.items()}
    read = dict(envs.read(environ, PATCHES).values.get(patch.name, {}))
    assert values.check(patch.options, read, lambda key: key) == patch.options()


def test_every_shipped_variable_is_documented() -> None:
    """The documentation names each switch and value once, all in the namespace, and no name reads two ways."""
    known = envs.documented(PATCHES)
    assert all(name.startswith("OMNI_FASTPATH") and meaning for name, meaning in known.items())
    assert len(known) == 2 + sum(1 + len(patch.options.model_fields) for patch in PATCHES)


def test_a_variable_of_an_earlier_version_says_what_became_of_it() -> None:
    """A variable of a patch or a key that is gone is unknown, and names the successor instead of a near spelling."""

    class Shrunk(Options):
        gone: ClassVar[Mapping[str, str]] = {"pitch": "always on"}

        count: int = 1

    patches = (Patch(**{**vars(MADE_UP[0]), "options": Shrunk}),)
    environ = {"OMNI_FASTPATH_DRUM__PITCH": "1", "OMNI_FASTPATH_FLUTE": "1", "OMNI_FASTPATH_FLUTE__KEY": "1"}
    lines = envs.read(environ, patches, {"flute": "part of drum"}).unknown
    assert [line.rpartition("; ")[2] for line in lines] == [
        "it is gone: always on",
        "it is gone: part of drum",
        "it is gone: part of drum",
    ]
