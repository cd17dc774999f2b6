"""The drafter's backbone: published names, the computation, and the two ways to attend."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex_module
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dflash.model import Drafter, DrafterConfig, flex_attend, sdpa_attend
from dflash.model.norm import RMSNorm
from dflash.model.rotary import rotary_tables, rotate
from dflash.objective import Anchors, dense_mask, flex_block_mask, positions

L, H, I, HQ, HKV, D, K, HT, B = 2, 24, 40, 4, 2, 8, 3, 20, 4  # noqa: E741


def make_config(**change):
    """A small drafter in which no two widths are equal by accident."""
    fields = {
        "hidden_size": H,
        "intermediate_size": I,
        "num_hidden_layers": L,
        "num_attention_heads": HQ,
        "num_key_value_heads": HKV,
        "head_dim": D,
        "target_hidden_size": HT,
        "num_target_layers": 9,
        "target_layer_ids": (1, 4, 6),
        "block_size": B,
        "mask_token_id": 63,
        "vocab_size": 64,
        "rope_theta": 1e4,
        "initializer_range": 0.2,
    }
    return DrafterConfig(**fields | change)


def make_drafter(seed=1, **change):
    """A drafter whose norms are not all ones, so that a forgotten gain shows."""
    drafter = Drafter(make_config(**change))
    generator = torch.Generator().manual_seed(seed)
    drafter.init_weights(generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
    return drafter


class Row:
    """One packed row of two documents and padding, with anchors close together and one unused."""

    def __init__(self, seed=2):
        generator = torch.Generator().manual_seed(seed)
        self.documents = torch.tensor([0] * 14 + [1] * 12 + [-1] * 3)
        self.position_ids = torch.cat([torch.arange(14), torch.arange(12), torch.arange(3)])
        self.anchors = Anchors(
            torch.tensor([3, 4, 9, 14, 20, 0]), torch.tensor([True] * 5 + [False])
        )
        self.features = torch.randn(1, 29, K * HT, generator=generator)
        self.embeddings = torch.randn(1, self.anchors.slots * B, H, generator=generator)
        self.positions = positions(self.position_ids, self.anchors, B)[None]
        self.dense = dense_mask(self.anchors, self.documents, B)[None, None]
        self.flex = flex_block_mask(self.anchors, self.documents, B)

    def run(self, drafter, mask=None, attend=sdpa_attend, features=None, embeddings=None):
        """Forward with the dense mask unless told otherwise: [N, B, H]."""
        out = drafter(
            self.features if features is None else features,
            self.embeddings if embeddings is None else embeddings,
            self.positions,
            self.dense if mask is None else mask,
            attend,
        )
        return out.unflatten(1, (-1, B))[0]


@pytest.fixture
def row():
    """A fresh row."""
    return Row()


@pytest.fixture
def dynamo():
    """Compiled code from a clean slate, and none left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def published_shapes(bias):
    """The published tensors of a DFlash drafter, written out."""
    shapes = {"fc.weight": [H, K * HT], "hidden_norm.weight": [H], "norm.weight": [H]}
    for i in range(L):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": [HQ * D, H],
            f"{attention}.k_proj.weight": [HKV * D, H],
            f"{attention}.v_proj.weight": [HKV * D, H],
            f"{attention}.o_proj.weight": [H, HQ * D],
            f"{attention}.q_norm.weight": [D],
            f"{attention}.k_norm.weight": [D],
            f"{mlp}.gate_proj.weight": [I, H],
            f"{mlp}.up_proj.weight": [I, H],
            f"{mlp}.down_proj.weight": [H, I],
            f"layers.{i}.input_layernorm.weight": [H],
            f"layers.{i}.post_attention_layernorm.weight": [H],
        }
        if bias:
            shapes |= {
                f"{attention}.q_proj.bias": [HQ * D],
                f"{attention}.k_proj.bias": [HKV * D],
                f"{attention}.v_proj.bias": [HKV * D],
                f"{attention}.o_proj.bias": [H],
            }
    return shapes


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_is_exactly_the_published_tensors(bias):
    """11 L + 3 names without prefix, no rotary buffers, no embedding, no head."""
    state = Drafter(make_config(attention_bias=bias)).state_dict()
    assert {name: list(tensor.shape) for name, tensor in state.items()} == published_shapes(bias)
    assert len(state) == 11 * L + 3 + (4 * L if bias else 0)


def test_initial_weights_are_normal_with_unit_gains_and_zero_biases():
    """Every matrix is drawn with initializer_range; norms start at 1."""
    drafter = Drafter(make_config(hidden_size=256, attention_bias=True, initializer_range=0.05))
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.005, name


def test_initial_weights_depend_on_the_generator_and_on_nothing_else():
    """Replicas are equal by construction, and the global generator is left alone."""
    before = torch.get_rng_state()
    torch.manual_seed(123)
    first = Drafter(make_config()).state_dict()
    torch.manual_seed(456)
    expected_global = torch.get_rng_state()
    second = Drafter(make_config())
    assert torch.equal(torch.get_rng_state(), expected_global)
    torch.set_rng_state(before)
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, first[name]), name
    second.init_weights(torch.Generator().manual_seed(9))
    assert not torch.equal(second.fc.weight, first["fc.weight"])


def naive_forward(state, features, x, where, visible, theta):
    """The drafter in float64, head by head and query by query, from its definition."""

    def rms(vector, gain):
        return gain * vector / (vector.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def turn(vector, position):
        out = vector.clone()
        for i in range(D // 2):
            angle = position.double() * theta ** (-2 * i / D)
            a, b = vector[i], vector[i + D // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + D // 2] = b * angle.cos() + a * angle.sin()
        return out

    w = {name: tensor.double() for name, tensor in state.items()}
    c = rms(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = x.double()
    for i in range(L):
        a, m = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        u = rms(x, w[f"layers.{i}.input_layernorm.weight"])
        both = torch.cat([c, u])

        def project(source, kind, a=a):
            return source @ w[f"{a}.{kind}_proj.weight"].T + w[f"{a}.{kind}_proj.bias"]

        q, k, v = project(u, "q"), project(both, "k"), project(both, "v")
        heads = []
        for h in range(HQ):
            g = h // (HQ // HKV)
            qh = rms(q[:, h * D : (h + 1) * D], w[f"{a}.q_norm.weight"])
            kh = rms(k[:, g * D : (g + 1) * D], w[f"{a}.k_norm.weight"])
            qh = torch.stack([turn(t, p) for t, p in zip(qh, where[len(c) :], strict=True)])
            kh = torch.stack([turn(t, p) for t, p in zip(kh, where, strict=True)])
            score = (qh @ kh.T / D**0.5).masked_fill(~visible, float("-inf"))
            heads.append(score.softmax(-1) @ v[:, g * D : (g + 1) * D])
        x = x + project(torch.cat(heads, dim=1), "o")
        u = rms(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate, up = u @ w[f"{m}.gate_proj.weight"].T, u @ w[f"{m}.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{m}.down_proj.weight"].T
    return rms(x, w["norm.weight"])


def test_forward_is_the_published_computation(row):
    """Against an independent float64 version with biases, gains and GQA groups all in play."""
    drafter = make_drafter(attention_bias=True)
    expected = naive_forward(
        drafter.state_dict(),
        row.features[0],
        row.embeddings[0],
        row.positions[0],
        row.dense[0, 0],
        1e4,
    )
    torch.testing.assert_close(
        row.run(drafter).flatten(0, 1).double(), expected, atol=2e-5, rtol=1e-4
    )


def test_norm_and_rotary_equal_transformers():
    """The serving side runs the drafter on transformers' Qwen3 parts."""
    x = torch.randn(2, HQ, 7, D, generator=torch.Generator().manual_seed(0))
    ours, theirs = RMSNorm(D, 1e-5), Qwen3RMSNorm(D, 1e-5)
    gain = torch.rand(D, generator=torch.Generator().manual_seed(1))
    ours.weight.data.copy_(gain)
    theirs.weight.data.copy_(gain)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16

    where = torch.tensor([[0, 1, 2, 3, 500, 501, 40000], [9, 9, 8, 0, 1, 2, 3]])
    config = Qwen3Config(head_dim=D, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    cos, sin = Qwen3RotaryEmbedding(config)(x, where)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rotate(x, *rotary_tables(where, D, 1e6)), expected)


def test_block_masked_forward_equals_one_block_at_a_time(row):
    """What training computes for a block is what serving computes with the context [start, a)."""
    drafter = make_drafter()
    together = row.run(drafter)
    for j, a in enumerate(row.anchors.positions.tolist()[:5]):
        start = 0 if a < 14 else 14
        block = slice(j * B, (j + 1) * B)
        alone = drafter(
            row.features[:, start:a],
            row.embeddings[:, block],
            torch.cat([torch.arange(a - start), a - start + torch.arange(B)])[None],
            None,
            sdpa_attend,
        )
        torch.testing.assert_close(together[j], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("at", "changed"), [(4, [2]), (3, [1, 2]), (14, [4]), (13, []), (0, [0, 1, 2]), (27, [])]
)
def test_a_feature_reaches_only_later_blocks_of_its_document(row, at, changed):
    """Adding 10 to the feature at p changes blocks with anchor > p, never the block at p itself."""
    drafter = make_drafter()
    moved = row.features.clone()
    moved[:, at] += 10
    difference = (row.run(drafter) - row.run(drafter, features=moved)).abs().amax(dim=(1, 2))
    assert (difference > 1e-4).nonzero().flatten().tolist() == changed
    untouched = [j for j in range(row.anchors.slots) if j not in changed]
    assert (difference[untouched] == 0).all()


def test_a_block_is_read_by_itself_only_and_in_both_directions(row):
    """Blocks at neighbouring anchors overlap in position and still do not see each other."""
    drafter = make_drafter()
    for slot in (0, B - 1):
        moved = row.embeddings.clone()
        moved[:, 1 * B + slot] += 10
        difference = (row.run(drafter) - row.run(drafter, embeddings=moved)).abs().amax(dim=2)
        assert (difference[1] > 1e-4).all()
        assert (difference[[0, 2, 3, 4, 5]] == 0).all()


def test_columns_of_fc_follow_the_order_of_the_layers():
    """Column block m of fc multiplies feature m; zeroing it makes that feature irrelevant."""
    drafter, row = make_drafter(), Row()
    with torch.no_grad():
        drafter.fc.weight[:, 1 * HT : 2 * HT] = 0
    base = row.run(drafter)
    for m in range(K):
        moved = row.features.clone()
        moved[..., m * HT : (m + 1) * HT] += 1
        changed = not torch.equal(base, row.run(drafter, features=moved))
        assert changed == (m != 1)


def test_positions_matter_and_are_relative(row):
    """RoPE is applied to queries and keys alike: a common shift is nothing, a gap is something."""
    drafter = make_drafter()
    base = row.run(drafter)
    row.positions = row.positions + 5
    torch.testing.assert_close(row.run(drafter), base, atol=1e-4, rtol=1e-4)
    row.positions[:, -row.anchors.slots * B :] += 3
    assert (row.run(drafter)[:5] - base[:5]).abs().amax(dim=(1, 2))[1:3].min() > 1e-3


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_equals_sdpa_without_gradients(row, dynamo):
    """The BlockMask and the dense mask are one mask; heads are grouped in the same way."""
    drafter = make_drafter()
    with torch.no_grad():
        flex = row.run(drafter, row.flex, flex_attend(flex_module.flex_attention))
        torch.testing.assert_close(flex, row.run(drafter), atol=1e-5, rtol=1e-5)


def test_compiled_flex_has_sdpa_gradients_and_new_anchors_do_not_recompile(
    row, dynamo, monkeypatch
):
    """Forward and backward of three steps with three draws of anchors: one compilation."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    counter = CompileCounterWithBackend("aot_eager")
    attend = flex_attend(
        torch.compile(flex_module.flex_attention, backend=counter, fullgraph=True, dynamic=False)
    )
    drafter = make_drafter(num_hidden_layers=1)
    for chosen in ([3, 4, 9, 14, 20, 0], [1, 2, 15, 16, 17, 0], [5, 6, 7, 8, 24, 0]):
        row.anchors = Anchors(torch.tensor(chosen), torch.tensor([True] * 5 + [False]))
        row.positions = positions(row.position_ids, row.anchors, B)[None]
        outputs, gradients = [], []
        for mask, how in (
            (dense_mask(row.anchors, row.documents, B), sdpa_attend),
            (flex_block_mask(row.anchors, row.documents, B), attend),
        ):
            drafter.zero_grad()
            out = row.run(drafter, mask, how)
            (out[:5] * torch.linspace(-1, 1, H)).sum().backward()
            outputs.append(out.detach())
            gradients.append({n: p.grad.clone() for n, p in drafter.named_parameters()})
        torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
        for name, expected in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1


def test_flex_attend_asks_for_grouped_heads_only_when_they_are_grouped():
    """enable_gqa, scale, mask and kernel options reach the callable as given."""
    seen = []

    def flex(q, k, v, **named):
        seen.append(named)
        return q

    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 5, 8)
    flex_attend(flex)(q, k, k, "mask", 0.5)
    flex_attend(flex, kernel_options={"BLOCK_M": 32})(q, q, q, "mask", 0.5)
    assert seen == [
        {"block_mask": "mask", "scale": 0.5, "enable_gqa": True},
        {
            "block_mask": "mask",
            "scale": 0.5,
            "enable_gqa": False,
            "kernel_options": {"BLOCK_M": 32},
        },
    ]


def test_sdpa_refuses_a_mask_that_would_be_added():
    """A float or int mask of zeros and ones would be added to the scores without any error."""
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="mask must be bool"):
        sdpa_attend(q, q, q, torch.ones(3, 3), 1.0)


def test_rows_of_a_batch_do_not_mix():
    """Two rows at once equal each row alone, with their own masks and positions."""
    drafter = make_drafter()
    rows = [Row(seed) for seed in (5, 6)]
    rows[1].anchors = Anchors(torch.tensor([2, 6, 7, 17, 24, 25]), torch.ones(6, dtype=torch.bool))
    rows[1].positions = positions(rows[1].position_ids, rows[1].anchors, B)[None]
    rows[1].dense = dense_mask(rows[1].anchors, rows[1].documents, B)[None, None]
    both = drafter(
        *(torch.cat([getattr(r, n) for r in rows]) for n in ("features", "embeddings")),
        torch.cat([r.positions for r in rows]),
        torch.cat([r.dense for r in rows]),
        sdpa_attend,
    )
    for out, one in zip(both, rows, strict=True):
        torch.testing.assert_close(
            out.unflatten(0, (-1, B)), one.run(drafter), atol=1e-5, rtol=1e-5
        )


def test_every_parameter_learns_under_bf16_autocast(row):
    """fp32 weights, bf16 compute: finite gradients in fp32 for all of them, output near fp32's."""
    drafter = make_drafter()
    exact = row.run(drafter).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = row.run(drafter)
    assert out.dtype == torch.float32  # the residual stream keeps the embeddings' dtype
    assert F.cosine_similarity(out.flatten(), exact.flatten(), dim=0) > 0.999
    out.square().sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("features", torch.zeros(1, 29, K * HT - 1), "features must be"),
        ("embeddings", torch.zeros(1, 24, H + 1), "block_embeddings must be"),
        ("positions", torch.zeros(1, 29, dtype=torch.int64), "positions must be"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(row, field, value, said):
    """A wrong feature width would otherwise surface as a matmul error deep inside."""
    setattr(row, field, value)
    with pytest.raises(ValueError, match=said):
        row.run(make_drafter())
