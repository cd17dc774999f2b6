"""Run as a program, with only the z-lab wheel on PYTHONPATH: its hidden states for our export.

Usage: zlab_forward.py WHEEL_FOLDER EXPORT INPUTS OUTPUTS. Loads strictly, then runs its inference
forward once per anchor, the context before it as an unmasked prefix.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

wheel, export, inputs_path, outputs_path = sys.argv[1:]

import dflash.model  # noqa: E402  (theirs: the test has put only the wheel on the path)

found = Path(dflash.model.__file__).resolve()
assert found.is_relative_to(Path(wheel).resolve()), f"this is not the wheel: {found}"

torch.set_num_threads(1)
model, report = dflash.model.DFlashDraftModel.from_pretrained(
    export, dtype=torch.float32, output_loading_info=True
)
model.eval()
faults = {name: sorted(map(str, value)) for name, value in report.items() if value}
assert not faults, f"not a strict load: {faults}"
inputs = load_file(inputs_path)
features, embeddings = inputs["features"], inputs["embeddings"]
block = model.block_size
outputs = []
with torch.no_grad():
    for number, anchor in enumerate(inputs["anchors"].tolist()):
        outputs.append(
            model(
                position_ids=torch.arange(anchor + block)[None],
                noise_embedding=embeddings[:, number * block : (number + 1) * block],
                target_hidden=features[:, :anchor],
            )
        )
save_file(
    {
        "hidden": torch.cat(outputs),  # [N, B, H]
        "block_size": torch.tensor(block),
        "mask_token_id": torch.tensor(model.mask_token_id),
        "target_layer_ids": torch.tensor(model.target_layer_ids),
    },
    outputs_path,
)
