"""Saving, rotation, the best one, and what is refused."""

import json

import pytest
import torch

from dflash.checkpoint import CheckpointError, CheckpointStore


def content(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "master/fc.weight": torch.randn(4, 3, generator=generator),
        "exp_avg/fc.weight": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "step/fc.weight": torch.tensor(float(step)),
        "rng/torch": torch.get_rng_state(),
        "half": torch.randn(2, generator=generator).bfloat16(),
        "view": torch.arange(12).view(3, 4).T,
    }


def saved(folder, steps, keep=3):
    store = CheckpointStore(folder, keep)
    for step in steps:
        store.save(step, content(step), {"step": step})
    return store


def test_tensors_and_state_come_back_bit_for_bit(tmp_path):
    state = {"step": 7, "lr": 0.1 + 0.2, "data": {"epoch": 1, "row": [3, None, True, "ü"]}}
    store = CheckpointStore(tmp_path / "new" / "folder", keep=1)
    path = store.save(7, content(7), state)
    assert path.name == "step-000007" and path == store.latest() == store.latest_good()
    tensors, read = store.load(path)
    assert read == state
    assert set(tensors) == set(content(7))
    for name, tensor in content(7).items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "nothing")
    assert store.latest() is store.latest_good() is store.best() is None
    assert store.steps() == []


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    store = saved(tmp_path, [1, 2], keep=2)
    assert store.mark_best(1, 3.0)
    assert not store.mark_best(2, 2.5)
    for step in (3, 4, 5):
        store.save(step, content(step), {})
    assert store.steps() == [1, 4, 5] and store.best() == store.path(1)
    assert store.mark_best(5, 3.5)
    store.save(6, content(6), {})
    assert store.steps() == [5, 6] and store.best() == store.path(5)


def test_a_best_that_was_removed_by_hand_is_none(tmp_path):
    store = saved(tmp_path, [1, 2])
    store.mark_best(1, 9.0)
    for file in store.path(1).iterdir():
        file.unlink()
    store.path(1).rmdir()
    assert store.best() is None
    assert store.mark_best(2, 1.0) and store.best() == store.path(2)


@pytest.mark.parametrize(
    ("step", "metric", "said"), [(9, 1.0, "not saved"), (1, float("nan"), "metric of step 1")]
)
def test_a_mark_that_makes_no_sense_is_refused(tmp_path, step, metric, said):
    with pytest.raises(CheckpointError, match=said):
        saved(tmp_path, [1]).mark_best(step, metric)


def test_a_damaged_note_of_the_best_stops_no_save_and_removes_nothing(tmp_path):
    store = saved(tmp_path, [1, 2], keep=1)
    (tmp_path / "best.json").write_text("{")
    with pytest.warns(UserWarning, match=r"best\.json: damaged"):
        store.save(3, {}, {})
    assert store.steps() == [2, 3]
    with pytest.raises(CheckpointError, match="remove it"):
        store.best()


def test_unfinished_folders_are_never_checkpoints_and_go_at_the_next_save(tmp_path):
    store = saved(tmp_path, [1])
    part = tmp_path / "step-000009.part"
    part.mkdir()
    (part / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / "somebody's.part").mkdir()
    assert store.latest() == store.path(1)
    with pytest.raises(CheckpointError, match="unfinished"):
        store.load(part)
    store.save(2, {}, {})
    assert not part.exists() and (tmp_path / "somebody's.part").exists()


def test_saving_a_step_again(tmp_path):
    """Equal: left alone. Different: refused, and the first one stays. Damaged: replaced."""
    store = saved(tmp_path, [1])
    assert store.save(1, content(1), {"step": 1}) == store.path(1)
    with pytest.raises(CheckpointError, match="different checkpoint of this step"):
        store.save(1, content(2), {"step": 1})
    assert torch.equal(store.load(store.path(1))[0]["half"], content(1)["half"])
    (store.path(1) / "state.json").write_text("{}")
    store.save(1, content(2), {"step": 1})
    assert torch.equal(store.load(store.path(1))[0]["half"], content(2)["half"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit(path, **change):
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


DAMAGE = {
    "a flipped bit": (lambda f: flip(f / "tensors.safetensors"), "SHA-256"),
    "a cut file": (lambda f: (f / "tensors.safetensors").write_bytes(b"x"), "has 1 bytes, not"),
    "a lost file": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "a lost manifest": (lambda f: (f / "manifest.json").unlink(), "not a checkpoint"),
    "a cut manifest": (lambda f: (f / "manifest.json").write_text('{"for'), "is not JSON"),
    "binary": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is not JSON"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "not a mapping"),
    "foreign": (lambda f: edit(f / "manifest.json", format="other"), "not a checkpoint of this"),
    "newer": (lambda f: edit(f / "manifest.json", version=2), "newer than this trainer's 1"),
    "no version": (lambda f: edit(f / "manifest.json", version=None), "no version"),
    "renamed": (lambda f: edit(f / "manifest.json", step=4), "says step 4, not 2"),
    "no files": (lambda f: edit(f / "manifest.json", files={}), "lists no files"),
    "a way out": (lambda f: edit(f / "manifest.json", files={"../x": {}}), "bad entry"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_checkpoint_is_one_line_and_the_one_before_is_taken(tmp_path, kind):
    store = saved(tmp_path, [1, 2])
    damage, expected = DAMAGE[kind]
    damage(store.path(2))
    with pytest.raises(CheckpointError, match=expected) as caught:
        store.load(store.path(2))
    assert "\n" not in str(caught.value) and str(store.path(2)) in str(caught.value)
    said = []
    assert store.latest_good(said.append) == store.path(1)
    assert len(said) == 1 and expected in said[0] and "the one before is tried" in said[0]


def test_only_damaged_ones_is_an_error_not_none(tmp_path):
    store = saved(tmp_path, [1])
    flip(store.path(1) / "state.json")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints"):
        store.latest_good(lambda line: None)


def test_a_folder_that_is_not_there_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointStore.load(tmp_path / "step-000001")


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": object()}])
def test_a_state_that_json_would_change_is_refused(tmp_path, state):
    with pytest.raises(CheckpointError, match="JSON"):
        CheckpointStore(tmp_path).save(1, {}, state)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_share_memory_are_refused_in_one_line(tmp_path):
    whole = torch.arange(6)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path).save(1, {"a": whole, "b": whole}, {})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_nothing_can_be_a_pickle(tmp_path):
    path = saved(tmp_path, [1]).path(1)
    names = {"manifest.json", "state.json", "tensors.safetensors"}
    assert {file.name for file in path.iterdir()} == names
