"""Our export in the z-lab wheel `dflash==0.1.0`: loads strictly, and says the same.

The wheel has our import name, so it is unpacked under build/ and runs in a process of its own.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflash.export import export_drafter
from dflash.model import ContextCache, Drafter, DrafterConfig, sdpa_attend
from dflash.objective import Anchors, dense_mask, positions

VERSION = "0.1.0"
CACHE = Path(__file__).parents[2] / "build" / "oracles"
PROGRAM = Path(__file__).with_name("zlab_forward.py")
S, B, H = 96, 8, 64


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The folder with their package, unpacked; downloaded once."""
    folder = CACHE / f"zlab-dflash-{VERSION}"
    if folder.is_dir():
        return folder
    work = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work)]
    done = subprocess.run(
        [*command, f"dflash=={VERSION}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        pytest.fail(
            f"the oracle wheel dflash=={VERSION} cannot be downloaded: {why}", pytrace=False
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    part = CACHE / f".{folder.name}-{os.getpid()}"
    with zipfile.ZipFile(next(work.glob("dflash-*.whl"))) as archive:
        archive.extractall(part)
    try:
        part.rename(folder)  # another worker may have been faster
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def make_drafter(target, **change):
    fields = {
        "num_hidden_layers": 3,
        "block_size": B,
        "mask_token_id": 99,
        "target_layer_ids": (1, 4, 8),
        "initializer_range": 0.1,
    }
    drafter = Drafter(DrafterConfig.for_target(target, **fields | change))
    generator = torch.Generator().manual_seed(3)
    drafter.init_weights(generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:  # a forgotten gain must show
                parameter.uniform_(0.5, 1.5, generator=generator)
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
    return drafter


def theirs(wheel, folder, work, features, embeddings, anchors):
    """What their package computes from the export in `folder`."""
    inputs, outputs = work / "inputs.safetensors", work / "outputs.safetensors"
    save_file({"features": features, "embeddings": embeddings, "anchors": anchors}, inputs)
    elsewhere = work / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(wheel), str(folder), str(inputs), str(outputs)],
        env=os.environ | {"PYTHONPATH": str(wheel), "HF_HUB_OFFLINE": "1"},
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return load_file(outputs)


@pytest.mark.parametrize(
    "change",
    [{}, {"attention_bias": True, "num_key_value_heads": 4, "target_layer_ids": (8, 1)}],
    ids=["usual", "biases, own heads, two features in another order"],
)
def test_hidden_states_equal_per_anchor(wheel, tmp_path, change):
    """Training forward, cached decoding and their inference: within 1e-5 in fp32."""
    target = Qwen3Config(
        vocab_size=100,
        hidden_size=H,
        intermediate_size=96,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    drafter = make_drafter(target, **change)
    folder = export_drafter(tmp_path / "export", drafter, target, dtype=torch.float32)
    at = torch.tensor([3, 10, 11, 40, 77, 87])  # two closer than a block; one past the row's end
    anchors = Anchors(at, torch.ones_like(at, dtype=torch.bool))
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(1, S, drafter.config.feature_size, generator=generator)
    embeddings = torch.randn(1, anchors.slots * B, H, generator=generator)

    out = theirs(wheel, folder, tmp_path, features, embeddings, at)
    assert out["block_size"] == B and out["mask_token_id"] == 99
    assert tuple(out["target_layer_ids"].tolist()) == drafter.config.target_layer_ids

    with torch.no_grad():
        trained = drafter(
            features,
            embeddings,
            positions(torch.arange(S), anchors, B)[None],
            dense_mask(anchors, torch.zeros(S, dtype=torch.int64), B)[None, None],
            sdpa_attend,
        ).view(-1, B, H)
        served, cache = [], ContextCache()
        for number, anchor in enumerate(at.tolist()):
            drafter.extend_context(features[:, cache.length : anchor], cache)
            served.append(drafter.decode(embeddings[:, number * B : number * B + B], cache))
    torch.testing.assert_close(trained, out["hidden"], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat(served), out["hidden"], rtol=0, atol=1e-5)
