"""Checkpoints that were cut, changed or forged."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from archives import PAYLOAD, Manifest, graph_of, manifest_of, members, write
from checkpoints import loaded

from aitune_core import (
    AituneError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointIntegrityError,
    Module,
)

X = torch.ones(2, 4)


def same_results(model: Module) -> bool:
    return torch.equal(model(X), 2 * X + 3) and torch.equal(
        model(torch.ones(5, 4)), torch.full((5, 4), 5.0)
    )


def test_truncated_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    content = checkpoint.read_bytes()
    path = tmp_path / "cut.ait"
    for length in [*range(0, len(content), 37), *range(len(content) - 30, len(content))]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError) as caught:
            loaded(path)
        assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


def test_flipped_bits_are_refused_or_harmless(checkpoint: Path, tmp_path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    path = tmp_path / "flipped.ait"
    start = bytes(content).rindex(b"PK\x01\x02", 0, bytes(content).index(b"PK\x01\x02") + 4)
    chooser = random.Random(1)
    places = {*range(start, len(content)), *range(60), *chooser.sample(range(start), 250)}
    payload = bytes(content).index(PAYLOAD.encode())
    places |= set(range(payload - 40, payload + len(PAYLOAD) + 40))
    refused, paths = 0, set[str | None]()
    for place in sorted(places):
        flipped = content.copy()
        flipped[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(flipped)
        try:
            model = loaded(path)
        except CheckpointError as error:
            refused += 1
            paths.add(error.path)
        else:
            assert same_results(model), place
    assert refused > len(places) // 2
    assert paths == {str(path)}


def test_every_flipped_byte_of_payload_and_manifest_is_an_integrity_error(
    checkpoint: Path, tmp_path: Path
) -> None:
    files = members(checkpoint)
    path = tmp_path / "flipped.ait"
    chooser = random.Random(2)
    for name, count in ((PAYLOAD, 16), ("manifest.json", 100), ("manifest.json.sha256", 64)):
        for place in chooser.sample(range(len(files[name])), count):
            content = bytearray(files[name])
            content[place] ^= 1 << chooser.randrange(8)
            write(path, {**files, name: bytes(content)})
            with pytest.raises(CheckpointIntegrityError) as caught:
                loaded(path)
            assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x04.", b"\0" * 1000])
def test_other_files_are_no_checkpoints(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.ait"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError) as caught:
        loaded(path)
    assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


def test_other_zip_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(CheckpointFormatError):
        loaded(path)


@pytest.mark.parametrize("version", [2, 999])
def test_future_format_is_told_apart(checkpoint: Path, tmp_path: Path, version: int) -> None:
    path = tmp_path / "future.ait"
    manifest = manifest_of(checkpoint)
    manifest["format_version"] = version
    manifest["new"] = "thing"
    write(path, members(checkpoint), manifest=manifest)
    with pytest.raises(CheckpointFormatError) as caught:
        loaded(path)
    assert (caught.value.expected, caught.value.got) == (1, version)


CHANGES: list[Callable[[Manifest], object]] = [
    lambda manifest: manifest.clear(),
    lambda manifest: manifest.update(format="zip"),
    lambda manifest: manifest.update(format_version="1"),
    lambda manifest: manifest.update(format_version=None),
    lambda manifest: manifest.update(modules=[]),
    lambda manifest: manifest.update(modules={}),
    lambda manifest: manifest.update(modules=None),
    lambda manifest: manifest.update(modules=manifest["modules"] * 2),
    lambda manifest: manifest["modules"][0].pop("call_form"),
    lambda manifest: manifest["modules"][0].update(call_form="x"),
    lambda manifest: manifest["modules"][0].update(call_form=[{"name": "x", "kind": "?"}]),
    lambda manifest: manifest["modules"][0].update(name=7),
    lambda manifest: manifest["modules"][0].update(graphs=[]),
    lambda manifest: graph_of(manifest).pop("backend"),
    lambda manifest: graph_of(manifest).update(backend=[]),
    lambda manifest: graph_of(manifest).update(config=None),
    lambda manifest: graph_of(manifest).update(config={"nonsense": 1}),
    lambda manifest: graph_of(manifest).update(config={"fault": "nonsense"}),
    lambda manifest: graph_of(manifest).update(config={"label": 3}),
    lambda manifest: graph_of(manifest).update(data=None),
    lambda manifest: graph_of(manifest).update(data={}),
    lambda manifest: graph_of(manifest).update(data={"rows": 7}),
    lambda manifest: graph_of(manifest).update(files=None),
    lambda manifest: graph_of(manifest).update(files={}),
    lambda manifest: graph_of(manifest)["files"]["weights/values.bin"].pop("sha256"),
    lambda manifest: graph_of(manifest)["files"]["weights/values.bin"].update(size_bytes="16"),
    lambda manifest: graph_of(manifest)["files"].update({"weights/values.bin": None}),
    lambda manifest: graph_of(manifest).update(graph=None),
    lambda manifest: graph_of(manifest)["graph"].pop("inputs"),
    lambda manifest: graph_of(manifest)["graph"].update(inputs=3),
    lambda manifest: graph_of(manifest)["graph"].update(mutated_inputs=["a"]),
    lambda manifest: graph_of(manifest)["graph"].update(result_structure={"type": "no.such"}),
    lambda manifest: graph_of(manifest)["graph"].update(result_structure={"scalar": []}),
    lambda manifest: graph_of(manifest)["graph"].update(call_structure=["?"]),
    lambda manifest: graph_of(manifest)["graph"]["inputs"][0].update(dtype="nope"),
    lambda manifest: graph_of(manifest)["graph"]["inputs"][0].update(shape=["a"]),
    lambda manifest: graph_of(manifest)["graph"]["inputs"][0].update(surplus=1),
    lambda manifest: graph_of(manifest)["graph"]["inputs"][0]["shape"][0].update(min=99),
    lambda manifest: graph_of(manifest)["graph"]["inputs"][0]["shape"][0].update(name="a b"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_malformed_manifest_is_a_checkpoint_error(
    checkpoint: Path, tmp_path: Path, change: Callable[[Manifest], object]
) -> None:
    path = tmp_path / "malformed.ait"
    manifest = copy.deepcopy(manifest_of(checkpoint))
    change(manifest)
    write(path, members(checkpoint), manifest=manifest)
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b"\xff", b'{"format": NaN}', b"[" * 10**5]
)
def test_manifest_that_is_no_json_object_is_refused(
    checkpoint: Path, tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "malformed.ait"
    write(path, members(checkpoint), manifest=text)
    with pytest.raises(CheckpointFormatError) as caught:
        loaded(path)
    assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda files, path: write(path, {**files, "surplus": b"x"}),
        lambda files, path: write(path, {**files, "modules/0/graphs/0/../x": b"x"}),
        lambda files, path: write(path, {k: v for k, v in files.items() if k != PAYLOAD}),
        lambda files, path: write(path, {k: v for k, v in files.items() if k != "manifest.json"}),
        lambda files, path: write(path, files, double=PAYLOAD),
        lambda files, path: write(path, files, double="manifest.json"),
        lambda files, path: write(path, files, link=PAYLOAD),
        lambda files, path: write(path, files, compressed=PAYLOAD),
        lambda files, path: write(path, {**files, PAYLOAD: files[PAYLOAD] + b"x"}),
    ],
)
def test_members_must_be_exactly_those_that_are_listed(
    checkpoint: Path, tmp_path: Path, damage: Callable[[dict[str, bytes], Path], None]
) -> None:
    path = tmp_path / "damaged.ait"
    damage(members(checkpoint), path)
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    assert isinstance(caught.value, CheckpointIntegrityError | CheckpointFormatError)
    assert caught.value.path == str(path)
    assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("how", ["../{}", "../../../../{}", "a/../../{}", "{absolute}", "..\\{}"])
def test_listed_files_cannot_leave_the_work_folder(
    checkpoint: Path, tmp_path: Path, cache_dir: Path, how: str
) -> None:
    name = how.format("evil.bin", absolute=str(tmp_path / "evil.bin"))
    manifest, files = manifest_of(checkpoint), members(checkpoint)
    listed = graph_of(manifest)["files"]
    listed[name] = listed["weights/values.bin"]
    path = tmp_path / "evil.ait"
    write(path, {**files, f"modules/0/graphs/0/{name}": files[PAYLOAD]}, manifest=manifest)
    with pytest.raises(CheckpointError):
        loaded(path)
    assert not (tmp_path / "evil.bin").exists()
    assert [file for file in tmp_path.rglob("evil*") if file != path] == []
    assert list(cache_dir.rglob("evil*")) == []


@pytest.mark.parametrize("device", ["nowhere", 3, None, "meta"])
def test_malformed_device_is_an_error_of_ours(
    checkpoint: Path, tmp_path: Path, device: object
) -> None:
    path = tmp_path / "malformed.ait"
    manifest = manifest_of(checkpoint)
    manifest["modules"][0]["device_type"] = device
    write(path, members(checkpoint), manifest=manifest)
    with pytest.raises(AituneError):
        loaded(path)
