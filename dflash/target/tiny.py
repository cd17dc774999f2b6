"""The tiny target: a byte-level Qwen3-architecture LM of 3 M parameters, trained on the spot.

Covers its training from the standard library's sources, stopping and continuing, and the card.
The result depends on the sources, seed, steps, settings and number of threads only. Not covered:
anything larger; other people's models come from files (see ``load``).
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.data.stdlib import Sources, stdlib_sources
from dflash.target.bits import bits_per_byte
from dflash.target.byte_tokenizer import (
    EMBEDDING_ROWS,
    END_OF_TEXT_ID,
    byte_tokenizer,
    save_byte_tokenizer,
)
from dflash.target.errors import TargetError
from dflash.target.tiny_card import write_card

MAX_TOKENS = 4096


@dataclass(frozen=True)
class TinySettings:
    """Shape and training of the tiny target; the defaults are those of the bundled one.

    The learning rate warms up, stays, and falls linearly to 0 over the last ``decay_share`` of the
    steps. A constant middle, unlike a cosine, lets a run be shortened or extended on resume.
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    tokens_per_step: int = 3072
    row_tokens: int = 256
    long_row_tokens: int = 512  # in the last steps, so that later positions are learnt as well
    long_share: float = 0.25
    learning_rate: float = 6e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    decay_share: float = 0.5


@dataclass
class Progress:
    """How far a run is; saved with it."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def make_tiny_target(
    folder: str | Path,
    *,
    steps: int,
    seed: int = 0,
    threads: int = 1,
    settings: TinySettings | None = None,
    sources: Sources | None = None,
    resume: bool = False,
    log_every: int = 50,
    save_every: int = 200,
    say: Callable[[str], None] = print,
) -> float:
    """Trains the target and writes model, tokenizer, card and list of held-out files.

    After every ``save_every`` steps ``folder`` holds a complete model, and ``<folder>.training.pt``
    what ``resume`` continues from (removed at the end). Returns the held-out bits per byte.

    Raises TargetError for steps below 1, a folder that holds something already (without
    ``resume``), or nothing to resume.
    """
    settings = settings or TinySettings()
    folder = Path(folder).absolute()
    state_file = folder.with_name(folder.name + ".training.pt")
    if steps < 1:
        raise TargetError(f"make_tiny_target: steps must be at least 1, got {steps}")
    if resume and not state_file.is_file():
        raise TargetError(f"{state_file}: nothing to resume from")
    if folder.exists() and not folder.is_dir():
        raise TargetError(f"{folder}: is not a folder")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise TargetError(f"{folder}: is not empty; give another folder, or resume")
    sources = sources or stdlib_sources()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        training = _Training(settings, sources, seed)
        if resume:
            training.load(state_file)
        training.run(steps, log_every, save_every, lambda: training.save(folder, state_file), say)
        training.save(folder, state_file)
        bits = measure(folder, sources)
        progress = training.progress
        write_card(
            folder,
            settings=asdict(settings),
            command=f"dflash make-tiny-target FOLDER --steps {steps} --seed {seed} "
            f"--threads {threads}",
            sources=sources,
            steps=progress.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            threads=threads,
            machine=f"a CPU ({platform.machine()})",
            bits=bits,
        )
        state_file.unlink()
        say(f"{folder}: {bits:.3f} bits per byte on {len(sources.held_out)} held-out files")
        return bits
    finally:
        torch.set_num_threads(before)


def measure(folder: Path, sources: Sources) -> float:
    """Bits per byte of a saved tiny target on all held-out files."""
    model = Qwen3ForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    return bits_per_byte(model, sources.held_out, byte_tokenizer(MAX_TOKENS))


class _Training:
    """One run: model, optimizers and position. Each step's rows depend on (seed, step) alone."""

    def __init__(self, settings: TinySettings, sources: Sources, seed: int) -> None:
        self.settings, self.seed, self.progress = settings, seed, Progress()
        self.text = _stream(sources.train)
        held_out = _stream(sources.held_out)
        self.probe = _rows(held_out, 32, settings.row_tokens, torch.Generator().manual_seed(seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Qwen3ForCausalLM(_config(settings))
        matrices = [p for name, p in self.model.named_parameters() if _is_matrix(name, p)]
        others = [p for name, p in self.model.named_parameters() if not _is_matrix(name, p)]
        # Muon (orthogonalised momentum, K. Jordan 2024) for the matrices: fewer tokens to a loss.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            ),
        ]  # fmt: skip

    def run(
        self,
        steps: int,
        log_every: int,
        save_every: int,
        save: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Trains from the present step to ``steps``; loss in nats per byte."""
        total, seen, begin = 0.0, 0, time.monotonic()
        earlier = self.progress.seconds
        while self.progress.step < steps:
            rate = self._set_rate(steps)
            total += self._step(steps)
            seen += 1
            done = self.progress.step
            self.progress.seconds = earlier + time.monotonic() - begin
            if done % log_every == 0 or done == steps:
                speed = self.progress.tokens / self.progress.seconds
                say(
                    f"step {done}/{steps}  train {total / seen / math.log(2):.3f} bits  "
                    f"held-out {self._held_out() / math.log(2):.3f} bits  rate {rate:.2e}  "
                    f"{speed:.0f} tokens/s  {self.progress.seconds:.0f} s"
                )
                total, seen = 0.0, 0
            if done % save_every == 0 and done < steps:
                save()

    def _set_rate(self, steps: int) -> float:
        s, step = self.settings, self.progress.step
        warm = (step + 1) / s.warmup_steps if s.warmup_steps else 1.0
        left = (steps - step) / max(1.0, steps * s.decay_share)
        rate = s.learning_rate * min(1.0, warm, left)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rate

    def _step(self, steps: int) -> float:
        s, step = self.settings, self.progress.step
        length = s.long_row_tokens if step >= steps * (1 - s.long_share) else s.row_tokens
        draw = torch.Generator().manual_seed((self.seed << 32) + step)
        rows = _rows(self.text, max(1, s.tokens_per_step // length), length, draw)
        loss = self._loss(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += rows.shape[0] * length
        return float(loss.detach())

    def _loss(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def _held_out(self) -> float:
        return float(self._loss(self.probe))

    def save(self, folder: Path, state_file: Path) -> None:
        """Writes the training state, then a complete model; each file appears whole or not."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "progress": asdict(self.progress),
            "settings": asdict(self.settings),
            "seed": self.seed,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = state_file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, state_file)
        half = Qwen3ForCausalLM(_config(self.settings)).to(torch.bfloat16)
        half.load_state_dict(self.model.state_dict())
        staging = folder / "partial"
        half.save_pretrained(staging)
        save_byte_tokenizer(staging, MAX_TOKENS)
        for path in staging.iterdir():
            os.replace(path, folder / path.name)
        staging.rmdir()

    def load(self, state_file: Path) -> None:
        """Continues the run that wrote ``state_file``; raises TargetError for another run's."""
        state: dict[str, Any] = torch.load(state_file, weights_only=True)
        ours = {"settings": asdict(self.settings), "seed": self.seed}
        for name, value in ours.items():
            if state[name] != value:
                raise TargetError(f"{state_file}: was made with other {name}: {state[name]}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def _config(settings: TinySettings) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=EMBEDDING_ROWS,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
    # On the CPU, torch's fused attention has a slow backward pass at these sizes.
    config._attn_implementation = "eager"
    return config


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def _stream(files: tuple[Path, ...]) -> Tensor:
    """All files' bytes one after another, each after an end of text: [T] int16."""
    parts = []
    for path in files:
        parts.append(torch.tensor([END_OF_TEXT_ID], dtype=torch.int16))
        parts.append(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).short())
    return torch.cat(parts)


def _rows(stream: Tensor, count: int, length: int, draw: torch.Generator) -> Tensor:
    """``count`` pieces of ``length`` + 1 tokens from random places: int64."""
    start = torch.randint(len(stream) - length, (count, 1), generator=draw)
    return stream[start + torch.arange(length + 1)].long()
