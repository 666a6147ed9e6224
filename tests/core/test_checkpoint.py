from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import PAYLOAD, graph_of, manifest_of, members, write
from checkpoints import REGISTRY, loaded, saved
from fake_plugin import empty_registry
from fakes import AffineBackend, AffineEngine, FakeBackend
from samples import Affine, Function, graphs_of, tuned
from torch import Tensor, nn
from treedata import Output, Plain, Registered

from aitune_core import (
    ArtifactWriter,
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    InputMismatchError,
    MissWarning,
    Module,
    PluginRegistry,
    load,
    save,
    tune,
)
from aitune_core._module import state_of

X = torch.ones(2, 4)


def test_loaded_module_gives_the_same_results(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    assert torch.equal(model(X), 2 * X + 3)
    assert torch.equal(model(x=torch.ones(4, 4)), torch.full((4, 4), 5.0))
    engine = graphs_of(model)[0].engine
    assert isinstance(engine, AffineEngine)
    assert engine.runs == 2
    assert state_of(model).name == "net"


def test_miss_without_the_module_is_an_error(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    with pytest.raises(InputMismatchError) as caught:
        model(torch.ones(6, 4))
    assert (caught.value.path, caught.value.got) == ("x", 6)
    with pytest.raises(TypeError):
        model(X, 1)
    model.train()
    with pytest.raises(InputMismatchError, match=r"training mode.*eval\(\)"):
        model(X)
    assert torch.equal(model.eval()(X), 2 * X + 3)


def test_loaded_module_without_weights_says_where_it_runs(checkpoint: Path) -> None:
    model: Any = loaded(checkpoint)
    for move in (model.half, model.double, lambda: model.to("meta")):
        with pytest.raises(ConfigError, match=r"'net' .* runs on cpu in torch\.float32.*device="):
            move()
    assert model.float() is model.cpu() is model.to("cpu", torch.float32) is model
    assert torch.equal(model(X), 2 * X + 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_loaded_module_cannot_be_moved_to_what_is_not_there(checkpoint: Path) -> None:
    model: Any = loaded(checkpoint)
    for move in (model.cuda, lambda: model.to("cuda")):
        with pytest.raises(ConfigError) as caught:
            move()
        assert caught.value.field == "device"


@pytest.mark.parametrize("after_tune", ["keep", "offload", "release"])
def test_module_whose_weights_changed_is_not_saved(after_tune: Any, tmp_path: Path) -> None:
    model = tuned(Affine(), [X], backend=AffineBackend(), after_tune=after_tune)
    other = {"scale": torch.tensor(10.0), "shift": torch.tensor(0.0)}
    model.load_state_dict(other, assign=True)
    with pytest.raises(CheckpointError, match="weights were changed"):
        save(model, tmp_path / "net.ait", registry=REGISTRY)
    assert not (tmp_path / "net.ait").exists()


def test_module_can_be_given_as_fallback(checkpoint: Path) -> None:
    net = Affine().eval()
    model = loaded(checkpoint, module=net)
    assert isinstance(model, Affine)
    assert torch.equal(model(X), 2 * X + 3)
    with pytest.warns(MissWarning):
        assert torch.equal(model(torch.ones(6, 4)), torch.full((6, 4), 5.0))
    with pytest.raises(ConfigError, match="training mode"):
        loaded(checkpoint, module=Affine().train())
    strict = loaded(checkpoint, module=Affine().eval(), on_miss="error")
    with pytest.raises(InputMismatchError):
        strict(torch.ones(6, 4))


class OtherSignature(Affine):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize(
    "module", [Affine(2.5), Affine(2.0, 3.5), OtherSignature(), nn.Linear(4, 4)]
)
def test_module_that_does_not_fit_is_refused(checkpoint: Path, module: nn.Module) -> None:
    with pytest.raises(CheckpointError) as caught:
        loaded(checkpoint, module=module.eval())
    assert caught.value.path == str(checkpoint)
    assert caught.value.expected != caught.value.got


def structured(x: Tensor, inputs: dict[str, Any], *, flag: bool = True) -> Any:
    y = inputs["y"][0]
    return Output(
        first=Registered(x + y, None), second=[2 * x, {"k": (y * 0.5 if flag else y, "s", 1.5)}]
    )


def test_structures_survive_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    call = ((torch.ones(3), {"y": [torch.full((3,), 4.0), None]}), {"flag": True})
    saved(path, Function(structured), [call])
    result = loaded(path)(*call[0], flag=True)
    assert type(result) is Output
    assert type(result["first"]) is Registered
    assert result["first"].first.tolist() == [5.0] * 3
    assert result["first"].second is None
    assert result["second"][0].tolist() == [2.0] * 3
    value, text, number = result["second"][1]["k"]
    assert (value.tolist(), text, number) == ([2.0] * 3, "s", 1.5)


def test_changed_inputs_and_several_graphs_survive_a_checkpoint(tmp_path: Path) -> None:
    def forward(x: Tensor, cache: Tensor | None = None) -> Tensor:
        if cache is not None:
            cache.add_(x)
        return x * 3

    path = tmp_path / "m.ait"
    saved(path, Function(forward), [(X,), (X, torch.zeros(2, 4))])
    model = loaded(path)
    cache = torch.full((2, 4), 7.0)
    assert torch.equal(model(X, cache), 3 * X)
    assert torch.equal(cache, torch.full((2, 4), 8.0))
    assert torch.equal(model(X), 3 * X)
    assert [graph.engine.graph.name for graph in graphs_of(model)] == ["graph_0", "graph_1"]


def test_number_inputs_survive_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    saved(path, Function(lambda x, shift: x + shift), [(X[0, 0], 1.5), (X[0, 0], 2.5)])
    model = loaded(path)
    assert float(model(torch.tensor(1.0), 4.0)) == 5.0


def test_loaded_module_can_be_saved_again(checkpoint: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.ait"
    save(loaded(checkpoint), again, registry=REGISTRY)
    assert torch.equal(loaded(again)(X), 2 * X + 3)


def test_checkpoint_holds_no_pickle_no_code_and_no_user_data(checkpoint: Path) -> None:
    files = members(checkpoint)
    assert set(files) == {"manifest.json", "manifest.json.sha256", PAYLOAD}
    manifest = manifest_of(checkpoint)
    assert manifest["format_version"] == 1
    (module,) = manifest["modules"]
    assert "samples" not in module["graphs"][0]
    assert len(files[PAYLOAD]) == 16


def test_checkpoint_loads_where_the_class_cannot_be_imported(checkpoint: Path) -> None:
    here = Path(__file__).parent
    code = (
        "import sys, torch, aitune_core as ait\n"
        f"sys.path.insert(0, {str(here)!r})\n"
        "sys.modules['samples'] = None\n"
        "from fake_plugin import registry\n"
        f"model = ait.load({str(checkpoint)!r}, registry=registry())\n"
        "print(model(torch.ones(1 + 1, 4)).tolist()[0])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout.strip() == "[5.0, 5.0, 5.0, 5.0]"


def test_work_folder_of_a_loaded_engine_goes_with_it(checkpoint: Path, cache_dir: Path) -> None:
    model = loaded(checkpoint)
    assert len(list((cache_dir / "checkpoints").rglob("*.bin"))) == 1
    del model
    gc.collect()
    assert [path for path in (cache_dir / "checkpoints").rglob("*") if path.is_file()] == []


def test_missing_plugin_error_names_the_distribution(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    manifest = manifest_of(checkpoint)
    graph_of(manifest).update(distribution="aitune-affine", distribution_version="3.1")
    write(path, members(checkpoint), manifest=manifest)
    with pytest.raises(BackendUnavailableError) as caught:
        load(path, registry=empty_registry())
    assert caught.value.backend_name == "affine"
    assert caught.value.missing == "aitune-affine"
    assert caught.value.install_hint == "python -m pip install aitune-affine"


def test_manifest_names_distribution_and_version_of_the_plugin(tmp_path: Path) -> None:
    entry_point = metadata.EntryPoint("fakes", "fake_plugin", "aitune")
    vars(entry_point).update(dist=metadata.distribution("pluggy"))
    path = tmp_path / "m.ait"
    model = tuned(Affine().eval(), X, backend=AffineBackend())
    save(model, path, registry=PluginRegistry([entry_point]))
    graph = graph_of(manifest_of(path))
    assert (graph["backend"], graph["distribution"]) == ("affine", "pluggy")
    assert graph["distribution_version"] == metadata.version("pluggy")


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_device_that_is_not_there_is_unavailable(checkpoint: Path, device: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        loaded(checkpoint, device=device)
    assert caught.value.missing == device


@pytest.mark.parametrize("device", ["gpu", "meta", "mps", 1.5, ""])
def test_unknown_device_is_an_argument_that_cannot_be_used(checkpoint: Path, device: Any) -> None:
    with pytest.raises(ConfigError, match="'cpu', 'cuda' or one such as 'cuda:1'") as caught:
        loaded(checkpoint, device=device)
    assert (caught.value.field, caught.value.allowed) == ("device", ("cpu", "cuda"))


@pytest.mark.parametrize("path", [None, 3, b"net.ait", "", "a\0b", ["net.ait"]])
def test_path_must_be_one(path: Any) -> None:
    model = tuned(Affine(), [X], backend=AffineBackend())
    for use in (lambda: load(path), lambda: save(model, path, registry=REGISTRY)):
        with pytest.raises(ConfigError, match=r"file name such as 'model\.ait'") as caught:
            use()
        assert (caught.value.field, caught.value.value) == ("path", path)


def test_registry_must_be_one(checkpoint: Path, tmp_path: Path) -> None:
    model: Any = loaded(checkpoint)
    other: Any = 5
    for use in (
        lambda: load(checkpoint, registry=other),
        lambda: save(model, tmp_path / "other.ait", registry=other),
        lambda: tune(Module(Affine()), X, registry=other),
    ):
        with pytest.raises(ConfigError, match="PluginRegistry") as caught:
            use()
        assert (caught.value.field, caught.value.value) == ("registry", 5)


@pytest.mark.parametrize("module", [3, Affine, Module(Affine())], ids=["int", "class", "wrapped"])
def test_module_is_checked_before_the_file_is_read(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.ait", module=module)
    assert (caught.value.field, caught.value.value) == ("module", module)


def test_untuned_and_unwrapped_modules_cannot_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    for module in (Module(Affine()), Affine(), None):
        with pytest.raises(CheckpointError):
            save(module, path, registry=REGISTRY)  # type: ignore[arg-type]
    assert not path.exists()


class Derived(AffineBackend):
    pass


@pytest.mark.parametrize("backend", [FakeBackend(), Derived()])
def test_engines_that_could_not_be_loaded_are_refused_when_saving(
    tmp_path: Path, backend: Any
) -> None:
    path = tmp_path / "m.ait"
    path.write_bytes(b"what was there")
    model = tuned(Affine().eval(), X, backend=backend)
    with pytest.raises(CheckpointError):
        save(model, path, registry=REGISTRY)
    assert path.read_bytes() == b"what was there"
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["m.ait"]


def test_result_of_an_unregistered_class_is_refused_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    model = tuned(Function(lambda x: Plain(x * 2, 1)).eval(), X, backend=AffineBackend())
    assert model(X).first.tolist() == (2 * X).tolist()
    with pytest.raises(CheckpointError, match=r"treedata\.Plain") as caught:
        save(model, path, registry=REGISTRY)
    assert caught.value.path == str(path)
    assert not path.exists()


def test_data_of_an_engine_that_is_no_json_is_a_checkpoint_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_data(_self: AffineEngine, artifacts: ArtifactWriter) -> None:
        artifacts.data["rows"] = torch.ones(1)

    model = tuned(Affine().eval(), X, backend=AffineBackend())
    monkeypatch.setattr(AffineEngine, "save", save_data)
    with pytest.raises(CheckpointError):
        save(model, tmp_path / "m.ait", registry=REGISTRY)


def test_folder_as_target_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_text("x")
    model = tuned(Affine().eval(), X, backend=AffineBackend())
    with pytest.raises(CheckpointError) as caught:
        save(model, folder, registry=REGISTRY)
    assert caught.value.path == str(folder)
    assert (folder / "mine").read_text() == "x"


def test_saving_replaces_a_checkpoint_that_is_in_use(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    saved(checkpoint, Affine(10.0))
    assert torch.equal(model(X), 2 * X + 3)
    assert torch.equal(loaded(checkpoint)(X), 10 * X + 3)
    assert torch.equal(loaded(checkpoint)(X), 10 * X + 3)


def test_checkpoint_may_be_deleted_after_loading(checkpoint: Path) -> None:
    model = loaded(checkpoint)
    checkpoint.unlink()
    assert torch.equal(model(X), 2 * X + 3)


def test_weights_released_before_saving_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    model = tuned(Affine().eval(), X, backend=AffineBackend(), after_tune="release")
    save(model, path, registry=REGISTRY)
    assert torch.equal(loaded(path)(X), 2 * X + 3)
    assert torch.equal(loaded(path, module=Affine().eval())(X), 2 * X + 3)


def test_paths_may_be_strings(tmp_path: Path) -> None:
    path = tmp_path / "m.ait"
    saved(path)
    shutil.copy(path, tmp_path / "copy")
    assert torch.equal(load(str(tmp_path / "copy"), registry=REGISTRY)(X), 2 * X + 3)
