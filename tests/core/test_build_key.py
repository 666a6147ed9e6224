from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from fakes import AffineBackend, FakeBackend
from samples import Affine, Function, mlp, recorded
from torch import Tensor, nn

from aitune_core import Backend, BackendConfig, BuildRequest, _distributions
from aitune_core._build_key import build_key
from aitune_core._identity import ContentHash, TensorHashes, UnknownContentError
from aitune_core._trial import GraphTrial

X = torch.arange(8.0).reshape(2, 4)


def request_of(module: Any, *inputs: Any) -> BuildRequest:
    (graph,) = recorded(module, *((x,) for x in inputs or (X,)))
    trial = GraphTrial(
        "net",
        graph,
        (),
        torch.device("cpu"),
        started=lambda _: None,
        finished=lambda _: None,
    )
    return trial.request(Path("unused"))


def key_of(module: Any, *inputs: Any, backend: Backend | None = None) -> str:
    key = build_key(backend or AffineBackend(), request_of(module, *inputs), TensorHashes())
    assert key is not None
    return key


def content_of(value: object) -> str:
    content = ContentHash(TensorHashes())
    content.add("value", value)
    return content.hexdigest()


def compiled(source: str) -> nn.Module:
    """Return the module ``net`` that source code makes."""
    space = types.ModuleType("written")
    exec(source, space.__dict__)  # noqa: S102 - written above
    net = space.__dict__["net"]
    assert isinstance(net, nn.Module)
    return net.eval()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.power = 2
        self.names = {"b", "a", "c"}

    def forward(self, x: Tensor) -> Tensor:
        return torch.pow(self.linear(x) + self.offset, self.power)


def shifted(amount: float, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return output + amount


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def flip_one_bit(module: Net) -> None:
    module.linear.weight.data.view(torch.int32)[1, 2] ^= 1


def change_buffer(module: Net) -> None:
    module.offset[3] = 1e-30  # type: ignore[operator]


def change_attribute(module: Net) -> None:
    module.power = 3


def change_set(module: Net) -> None:
    module.names.add("d")


def replace_forward(module: Net) -> None:
    module.forward = lambda x: module.linear(x) + 1  # type: ignore[method-assign]


def add_hook(module: Net) -> None:
    module.linear.register_forward_hook(lambda _module, _args, output: output + 1)


def swap_part(module: Net) -> None:
    class Other(nn.Linear):
        pass

    module.linear.__class__ = Other


def lay_out_otherwise(module: Net) -> None:
    weight = module.linear.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize(
    "change",
    [
        flip_one_bit,
        change_buffer,
        change_attribute,
        change_set,
        replace_forward,
        add_hook,
        swap_part,
        lay_out_otherwise,
    ],
)
def test_whatever_a_module_computes_with_is_in_its_key(change: Callable[[Net], None]) -> None:
    module = net()
    before = key_of(module)
    assert key_of(net()) == before
    change(module)
    assert key_of(module) != before


@pytest.mark.parametrize(
    "inputs",
    [
        (X + torch.eye(4)[:2],),
        (X.t().contiguous().t(),),
        (X.double(),),
        (X[:1],),
        (X, X),
        (X, X[:1]),
    ],
    ids=["value", "strides", "dtype", "shape", "count", "dims"],
)
def test_samples_are_in_the_key(inputs: tuple[Tensor, ...]) -> None:
    module = Affine().eval()
    assert key_of(module, *inputs) != key_of(module, X)
    assert key_of(module, *(tensor.clone() for tensor in inputs)) == key_of(module, *inputs)


def test_constants_of_a_call_are_in_the_key() -> None:
    def scaled(x: Tensor, mode: str) -> Tensor:
        return x * len(mode)

    keys = set()
    for mode in ("one", "two"):
        (graph,) = recorded(Function(scaled), (X, mode))
        trial = GraphTrial(
            "net", graph, (), torch.device("cpu"), started=lambda _: 0, finished=lambda _: 0
        )
        request = trial.request(Path("unused"))
        keys.add(build_key(AffineBackend(), request, TensorHashes()))
    assert len(keys) == 2
    assert None not in keys


def test_backend_with_its_options_and_fingerprint_is_in_the_key() -> None:
    class Other(AffineBackend):
        pass

    class Newer(AffineBackend):
        version = "1"

        def fingerprint(self, device: torch.device) -> Mapping[str, str]:
            return {**(super().fingerprint(device) or {}), "driver": self.version}

    module = Affine().eval()
    keys = [
        key_of(module),
        key_of(module, backend=AffineBackend(AffineBackend.config_class(label="b"))),  # type: ignore[call-arg]
        key_of(module, backend=Other()),
        key_of(module, backend=Newer()),
    ]
    Newer.version = "2"
    keys.append(key_of(module, backend=Newer()))
    assert len(set(keys)) == len(keys)


def test_version_of_a_requirement_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Affine().eval()
    before = key_of(module)
    versions = _distributions._version
    monkeypatch.setattr(
        _distributions, "_version", lambda name: "9.9" if name == "attrs" else versions(name)
    )
    _distributions.package_facts.cache_clear()
    try:
        assert key_of(module) != before
    finally:
        _distributions.package_facts.cache_clear()


def test_settings_of_torch_are_in_the_key() -> None:
    module = Affine().eval()
    before = key_of(module)
    torch.set_float32_matmul_precision("high")
    try:
        assert key_of(module) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert key_of(module) == before


SOURCE = """
import torch
from torch import nn
FACTOR = 2
def helper(x, *, bias=1):
    return x * FACTOR + bias
def made(power):
    return lambda x: x ** power
function = made(2)
class Base(nn.Module):
    def shift(self, x):
        return x + 1
class Net(Base):
    @property
    def scale(self):
        return 3
    @staticmethod
    def halved(x):
        return x / 2
    def forward(self, x):
        return function(self.halved(self.shift(helper(x) * self.scale)))
net = Net()
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("return 3", "return 4"),
        ("x / 2", "x / 4"),
        ("FACTOR = 2", "FACTOR = 3"),
        ("bias=1", "bias=2"),
        ("x * FACTOR + bias", "bias * FACTOR + x"),
        ("made(2)", "made(3)"),
        ("x ** power", "power ** x"),
    ],
)
def test_code_that_a_module_uses_is_in_its_key(old: str, new: str) -> None:
    assert old in SOURCE
    before = key_of(compiled(SOURCE))
    assert key_of(compiled(SOURCE)) == before
    assert key_of(compiled(SOURCE.replace(old, new))) != before


def test_module_with_a_name_of_pythons_own_is_known_by_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = types.ModuleType("statistics")
    written.__file__ = str(tmp_path / "statistics.py")
    monkeypatch.setitem(sys.modules, "statistics", written)
    keys = set()
    for factor in (2, 3):
        source = SOURCE.replace("FACTOR = 2", f"FACTOR = {factor}")
        exec(source, written.__dict__)  # noqa: S102 - written above
        keys.add(key_of(written.__dict__["net"].eval()))
    assert len(keys) == 2


def test_code_of_a_program_is_known_even_where_a_library_runs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = "/usr/lib/site-packages/launcher.py"
    monkeypatch.setitem(sys.modules, "__main__", program)
    keys = set()
    for factor in (2, 3):
        exec(SOURCE.replace("FACTOR = 2", f"FACTOR = {factor}"), program.__dict__)  # noqa: S102
        keys.add(key_of(program.__dict__["net"].eval()))
    assert len(keys) == 2


def test_backend_of_a_program_is_known_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for factor in (1, 2):

        class Local(AffineBackend):
            scale = factor

        monkeypatch.setattr(Local, "__module__", "__main__")
        keys.add(key_of(Affine().eval(), backend=Local()))
    assert len(keys) == 2


def test_comments_and_places_of_code_do_not_count() -> None:
    moved = "\n\n# moved\n" + SOURCE.replace("return 3", "return 3  # three")
    assert key_of(compiled(moved)) == key_of(compiled(SOURCE))


def test_code_behind_a_cache_is_in_the_key() -> None:
    keys = set()
    for factor in (2, 3):
        source = SOURCE.replace("def helper", "import functools\n@functools.cache\ndef helper")
        keys.add(key_of(compiled(source.replace("FACTOR = 2", f"FACTOR = {factor}"))))
    assert len(keys) == 2


def test_copies_have_one_key_and_hooks_are_known_by_their_order() -> None:
    module = net()
    module.register_forward_hook(functools.partial(shifted, 1.0))
    module.linear.register_forward_hook(functools.partial(shifted, 2.0))
    assert key_of(copy.deepcopy(module)) == key_of(module)
    again = net()
    again.register_forward_hook(functools.partial(shifted, 1.0))
    again.linear.register_forward_hook(functools.partial(shifted, 2.0))
    assert key_of(again) == key_of(module)


def test_part_in_training_mode_is_another() -> None:
    module = net()
    before = content_of(module)
    module.linear.train()
    assert content_of(module) != before


def test_shared_weights_differ_from_equal_ones() -> None:
    shared, equal = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval() for _ in range(2))
    shared[1].weight = shared[0].weight
    equal.load_state_dict(shared.state_dict())
    assert key_of(shared) != key_of(equal)


PARTS = """
import collections, dataclasses, enum, functools, logging, threading, weakref
import attrs
@attrs.frozen
class Settings:
    size: int = 3
    names: frozenset = frozenset({"a", "b", None, 1})
@dataclasses.dataclass(frozen=True)
class Options:
    flag: bool = True
Point = collections.namedtuple("Point", "x y")
class Kind(enum.Enum):
    ONE = "one"
class Slots:
    __slots__ = ("a", "b")
    def __init__(self):
        self.a = {"x", "y", "z"}
net.things = [
    object(), {"a", "b", "c"}, ("k", (1, 2)), Settings(), Options(), Point(1, 2), Kind.ONE, Slots(),
    functools.partial(helper, bias=2), logging.getLogger("net"), threading.Lock(),
    weakref.ref(net), torch.Generator().manual_seed(1), functools.lru_cache(helper), range(3),
]
"""


def test_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.path.insert(0, sys.argv[2])\n"
        "import written, test_build_key as t; print(t.key_of(written.net), t.key_of(t.net()))"
    )
    # With parts whose order, identity or address differs between processes.
    (tmp_path / "written.py").write_text(SOURCE + PARTS)
    keys = {
        subprocess.run(
            [sys.executable, "-c", script, str(folder), str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            # The second one has compiled files of the first.
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1
    assert len(keys.pop().split()) == 2


class SparseWeight(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.eye(3).to_sparse()


class Hoarder(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.data = list(range(60_000))


@pytest.mark.parametrize("make", [SparseWeight, Hoarder])
def test_what_has_no_content_to_tell_has_no_key(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitune_core._identity._MAX_OBJECTS", 50_000)
    request = request_of(make().eval())
    with pytest.raises(UnknownContentError):
        build_key(AffineBackend(), request, TensorHashes())


def test_options_that_are_no_json_have_no_key() -> None:
    @attrs.frozen(kw_only=True)
    class Config(BackendConfig):
        thing: object = attrs.field(factory=object)

    class Odd(AffineBackend):
        config_class = Config

    with pytest.raises(UnknownContentError, match="JSON"):
        build_key(Odd(), request_of(Affine().eval()), TensorHashes())


def test_torchscript_has_no_key() -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        traced = torch.jit.trace(mlp(), X)  # type: ignore[no-untyped-call]
    with pytest.raises(UnknownContentError):
        content_of(traced)


def test_backend_without_a_fingerprint_has_no_key_and_nothing_is_read() -> None:
    class Unstored(FakeBackend):
        def fingerprint(self, device: torch.device) -> None:
            return None

    hashes = TensorHashes()
    assert build_key(Unstored(), request_of(Affine().eval()), hashes) is None
    assert hashes._known == {}


def test_endless_nesting_is_unknown_content() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(UnknownContentError):
        content_of(deep)
    endless: list[Any] = []
    endless.append(endless)
    assert content_of(endless) != content_of([[]])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(48.0).reshape(2, 3, 8)[..., ::2],
        torch.arange(4.0).expand(6, 4),
        torch.arange(12.0).to(torch.bfloat16).reshape(3, 4),
        torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2)).conj(),
        torch.arange(24.0).reshape(2, 3, 4).to(torch.float8_e4m3fn),
        torch.arange(24).reshape(2, 12) > 3,
    ],
    ids=["plain", "permuted", "strided", "expanded", "bf16", "conjugate", "float8", "bool"],
)
def test_every_element_counts_whatever_the_layout_and_the_pieces(
    tensor: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = TensorHashes().of(tensor)
    monkeypatch.setattr("aitune_core._identity._PIECE_BYTES", 16)
    assert TensorHashes().of(tensor) == whole
    flat = tensor.clone().reshape(-1)
    for index in range(flat.numel()):
        other = flat.clone()
        other[index] = other[index].logical_not() if tensor.dtype is torch.bool else 100
        changed = torch.empty_like(tensor, memory_format=torch.preserve_format)
        changed.copy_(other.reshape(tensor.shape))
        assert content_of(changed) != content_of(changed.clone().copy_(tensor))


def test_known_hash_is_forgotten_with_the_values() -> None:
    hashes, tensor = TensorHashes(), torch.zeros(4)
    before = hashes.of(tensor)
    assert hashes.of(tensor) == before
    tensor[0] = 1
    written = hashes.of(tensor)
    assert written != before
    tensor.data = torch.full((4,), 2.0)
    assert hashes.of(tensor) not in (before, written)


def test_tensor_of_inference_mode_is_read_each_time() -> None:
    hashes = TensorHashes()
    with torch.inference_mode():
        tensor = torch.zeros(4)
        before = hashes.of(tensor)
        tensor[0] = 1
        assert hashes.of(tensor) != before


def test_negative_zero_and_kinds_of_numbers_differ() -> None:
    values: list[Any] = [
        0.0,
        -0.0,
        0,
        False,
        None,
        "0",
        b"0",
        (),
        [],
        {},
        set(),
        [[]],
        ["a", "b"],
        ["ab"],
    ]
    assert len({content_of(value) for value in values}) == len(values)
