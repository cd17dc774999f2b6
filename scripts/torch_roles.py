"""Writes the tables of `harness/triage/roles/` from the torch wheels of the package index.

    python scripts/torch_roles.py                # every version of VERSIONS
    python scripts/torch_roles.py 2.11.0 2.15.0  # these

A wheel is a zip file of up to 900 MB, of which some sixty source files are wanted: they are read
by HTTP range requests, about 10 MB a version. The tables hold facts only (file, line range,
function, what a line does, a checksum of its text), no source text.
"""

from __future__ import annotations

import io
import json
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from harness.triage.source import facts_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "harness" / "triage" / "roles"
INDEX = "https://pypi.org/simple/torch/"
JSON_INDEX = "application/vnd.pypi.simple.v1+json"
SECONDS = 120  # for one request

VERSIONS = (
    "2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0",
    "2.14.1", "2.15.0",
)  # fmt: skip

# The files whose frames stand in the tracebacks of compile failures, and the ones that stand in
# nearly every traceback of a training program, which tell the version.
FILES = (
    "torch/_compile.py",
    "torch/_dynamo/aot_compile.py",
    "torch/_dynamo/backends/common.py",
    "torch/_dynamo/compiled_autograd.py",
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_dynamo/external_utils.py",
    "torch/_dynamo/output_graph.py",
    "torch/_dynamo/metrics_context.py",
    "torch/_dynamo/repro/after_dynamo.py",
    "torch/_functorch/aot_autograd.py",
    "torch/_functorch/_aot_autograd/autograd_cache.py",
    "torch/_functorch/_aot_autograd/graph_capture.py",
    "torch/_functorch/_aot_autograd/graph_compile.py",
    "torch/_functorch/_aot_autograd/runtime_wrappers.py",
    "torch/_functorch/_aot_autograd/utils.py",
    "torch/_guards.py",
    "torch/_higher_order_ops/flex_attention.py",
    "torch/_higher_order_ops/utils.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/compile_fx.py",
    "torch/_inductor/cudagraph_trees.py",
    "torch/_inductor/output_code.py",
    "torch/_inductor/runtime/triton_heuristics.py",
    "torch/_ops.py",
    "torch/_tensor.py",
    "torch/_utils.py",
    "torch/_utils_internal.py",
    "torch/autograd/__init__.py",
    "torch/autograd/function.py",
    "torch/autograd/graph.py",
    "torch/compiler/__init__.py",
    "torch/cuda/__init__.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/device_mesh.py",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py",
    "torch/distributed/launcher/api.py",
    "torch/distributed/run.py",
    "torch/fx/_symbolic_trace.py",
    "torch/fx/experimental/proxy_tensor.py",
    "torch/fx/traceback.py",
    "torch/multiprocessing/reductions.py",
    "torch/multiprocessing/spawn.py",
    "torch/nn/attention/flex_attention.py",
    "torch/nn/modules/module.py",
    "torch/nn/parallel/data_parallel.py",
    "torch/nn/parallel/distributed.py",
    "torch/nn/parallel/parallel_apply.py",
    "torch/optim/lr_scheduler.py",
    "torch/optim/optimizer.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_device.py",
    "torch/utils/checkpoint.py",
    "torch/utils/data/_utils/fetch.py",
    "torch/utils/data/_utils/pin_memory.py",
    "torch/utils/data/_utils/signal_handling.py",
    "torch/utils/data/_utils/worker.py",
    "torch/utils/data/dataloader.py",
)


class RangeFile(io.RawIOBase):
    """A file on a server, read by ranges; good for what zipfile needs."""

    def __init__(self, url: str) -> None:
        self.url, self.at = url, 0
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            self.size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        last = min(self.at + len(buffer), self.size) - 1
        if last < self.at:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.at}-{last}"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server does not serve ranges ({answer.status})")
            data = answer.read()
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def wheels() -> dict[str, str]:
    """Version -> address of its smallest wheel; the Python sources are the same in all."""
    request = urllib.request.Request(INDEX, headers={"Accept": JSON_INDEX})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        files = json.load(answer)["files"]
    best: dict[str, tuple[int, str]] = {}
    for entry in files:
        name = entry["filename"]
        # Windows wheels have the line ends of Windows, so another checksum per line.
        if not name.endswith(".whl") or "-cp312-cp312-" not in name or "-win_" in name:
            continue
        version = name.split("-")[1]
        best[version] = min(best.get(version, (1 << 62, "")), (entry["size"], entry["url"]))
    return {version: url for version, (_, url) in best.items()}


def table(url: str) -> dict[str, Any]:
    """The facts of one wheel; files that this version does not have are left out."""
    files = {}
    with zipfile.ZipFile(io.BufferedReader(RangeFile(url), 1 << 20)) as wheel:
        names = set(wheel.namelist())
        for name in FILES:
            if name in names:
                files[name] = facts_of(wheel.read(name).decode()).to_json()
    return files


def main(wanted: list[str]) -> int:
    """Writes a table per version; 1 when a version is not on the index."""
    addresses = wheels()
    earlier: dict[str, str] = {}  # the facts as text -> the version that has them
    missing = [version for version in wanted if version not in addresses]
    for version in wanted:
        if version in missing:
            print(f"error: torch {version} has no wheel on {INDEX}", file=sys.stderr)
            continue
        files = table(addresses[version])
        path = FOLDER / f"{version}.json"
        facts = json.dumps(files, sort_keys=True)
        same_as = earlier.setdefault(facts, version)
        content: dict[str, Any] = {"torch": version, "files": files}
        if same_as != version:
            content = {"torch": version, "same_as": same_as}
        text = json.dumps(content, separators=(",", ":"))
        path.write_text(text.replace('},"torch/', '},\n"torch/') + "\n")
        print(f"{path.relative_to(ROOT)}: {len(files)} files, {path.stat().st_size:,} bytes")
    return 1 if missing else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:] or list(VERSIONS)))
    except OSError as error:
        print(f"error: {INDEX}: cannot be read ({error}); try again later", file=sys.stderr)
        sys.exit(2)
