"""Feature capture: which stream, from which layer, in which thread, and nothing left behind."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.target import capture_features, decoder_layers

DEPTH, WIDTH, VOCAB = 5, 32, 50


def make_target(kind=Qwen3ForCausalLM):
    """A small random causal LM in eval mode, whose norms are not the identity."""
    torch.manual_seed(0)
    if kind is GPT2LMHeadModel:
        config = GPT2Config(n_embd=WIDTH, n_layer=DEPTH, n_head=4, vocab_size=VOCAB)
    else:
        make = Qwen3Config if kind is Qwen3ForCausalLM else LlamaConfig
        config = make(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=DEPTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB,
            initializer_range=0.2,
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=1,
        )
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def make_ids(seed=0, rows=2, length=9):
    """Random token ids [rows, length]."""
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def hook_count(model):
    """Forward hooks in the whole model."""
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.fixture
def target():
    """A small Qwen3."""
    return make_target()


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, LlamaForCausalLM, GPT2LMHeadModel])
def test_features_are_hidden_states_one_further_in_the_order_asked(kind):
    """Layer t leaves hidden_states[t + 1]; column block m belongs to the m-th id."""
    target, ids = make_target(kind), make_ids()
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    wanted = [3, 0, 2]
    features = capture_features(target, ids, wanted)
    assert features.shape == (2, 9, 3 * WIDTH)
    assert not features.requires_grad
    for m, t in enumerate(wanted):
        column = features[..., m * WIDTH : (m + 1) * WIDTH]
        assert torch.equal(column, states[t + 1])
        assert not torch.allclose(column, states[t], atol=1e-3)


@pytest.mark.parametrize("kind", [Qwen3ForCausalLM, LlamaForCausalLM])
def test_the_last_layer_is_taken_before_the_final_norm(kind):
    """transformers' hidden_states[-1] is normed; ours norms to it and differs from it."""
    target, ids = make_target(kind), make_ids()
    with torch.no_grad():
        normed = target(ids, output_hidden_states=True).hidden_states[-1]
        feature = capture_features(target, ids, [DEPTH - 1])
        torch.testing.assert_close(target.model.norm(feature), normed)
    assert not torch.allclose(feature, normed, atol=1e-2)


def test_nothing_runs_after_the_last_layer_asked_for(target):
    """The head over a whole row is the largest tensor of the step; later layers are wasted time."""
    ran = []
    for name, module in [("head", target.lm_head), ("norm", target.model.norm)] + [
        (f"layer {t}", layer) for t, layer in enumerate(target.model.layers)
    ]:
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    capture_features(target, make_ids(), [2, 1])
    assert ran == ["layer 0", "layer 1", "layer 2"]


def test_features_can_be_used_in_an_autograd_graph(target):
    """They are ordinary tensors without history, not inference tensors."""
    features = capture_features(target, make_ids(), [1])
    weight = torch.ones(WIDTH, requires_grad=True)
    (features * weight).sum().backward()
    assert torch.equal(weight.grad, features.sum(dim=(0, 1)))
    assert all(parameter.grad is None for parameter in target.parameters())


def test_features_are_a_copy_that_later_layers_cannot_change(target):
    """A layer that adds to the stream in place must not change what an earlier layer left."""
    ids = make_ids()
    expected = capture_features(target, ids, [1])

    def add_in_place(layer, args):
        args[0].add_(100.0)

    target.model.layers[2].register_forward_pre_hook(add_in_place)
    assert torch.equal(capture_features(target, ids, [1, 3])[..., :WIDTH], expected)


def test_hooks_are_gone_afterwards(target):
    """After success, and after a forward that failed, also before the first layer."""
    before = hook_count(target)
    capture_features(target, make_ids(), [0, 4])
    assert hook_count(target) == before

    def fail(*_):
        raise RuntimeError("layer broke")

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer broke"):
        capture_features(target, make_ids(), [0, 4])
    handle.remove()
    with pytest.raises(IndexError):
        capture_features(target, torch.full((1, 3), VOCAB), [0])
    assert hook_count(target) == before
    # The failed captures left no state either: a plain forward runs to its end.
    with torch.no_grad():
        assert target(make_ids()).logits.shape == (2, 9, VOCAB)


def test_packed_documents_stay_apart_when_positions_restart(target):
    """Features of a document in a packed row equal those of the document alone."""
    first, second = make_ids(1, rows=1, length=6), make_ids(2, rows=1, length=5)
    packed = capture_features(
        target,
        torch.cat([first, second], dim=1),
        [0, 4],
        position_ids=torch.cat([torch.arange(6), torch.arange(5)])[None],
    )
    alone = [capture_features(target, ids, [0, 4]) for ids in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


def test_attention_mask_reaches_the_model(target):
    """Left padding that is masked does not change the features of the real tokens."""
    ids = make_ids(3, rows=1, length=6)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids], dim=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    features = capture_features(target, padded, [3], attention_mask=mask)
    torch.testing.assert_close(
        features[:, 2:], capture_features(target, ids, [3]), atol=1e-5, rtol=1e-5
    )


def test_layers_that_return_tuples_are_read_too():
    """transformers' layers did before version 5, and remote code still may."""

    class Layer(nn.Module):
        def forward(self, x):
            return x + 1, "cache"

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, input_ids, use_cache):
            x = input_ids[..., None].float()
            for layer in self.layers:
                x = layer(x)[0]
            return x

    features = capture_features(Decoder(), torch.tensor([[5, 7]]), [1, 0])
    assert features.tolist() == [[[7.0, 6.0], [9.0, 8.0]]]


def test_a_capture_inside_a_capture_keeps_models_apart(target):
    """A pass through another model, plain or captured, is not taken for one's own."""
    other, ids = make_target(LlamaForCausalLM), [make_ids(1), make_ids(2)]
    expected = [capture_features(target, ids[0], [0, 3]), capture_features(other, ids[1], [2, 1])]
    with torch.no_grad():
        logits = target(ids[1]).logits
    inner = {}

    def once(key, run):
        def before_layer(layer, args):
            if key not in inner:
                inner[key] = None
                inner[key] = run()

        return before_layer

    target.model.layers[1].register_forward_pre_hook(
        once("captured", lambda: capture_features(other, ids[1], [2, 1]))
    )
    other.model.layers[1].register_forward_pre_hook(once("plain", lambda: target(ids[1]).logits))
    assert torch.equal(capture_features(target, ids[0], [0, 3]), expected[0])
    assert torch.equal(inner["captured"], expected[1])
    assert torch.equal(inner["plain"], logits)


def meet_in_layer(target, index, parties):
    """Make every thread wait inside layer `index` until `parties` threads are there."""
    barrier = threading.Barrier(parties, timeout=30)

    def meet(layer, args):
        barrier.wait()

    target.model.layers[index].register_forward_pre_hook(meet)


def test_two_threads_capture_from_one_model_at_once(target):
    """Both are inside the model together, want different layers, and get only their own."""
    ids = [make_ids(1), make_ids(2)]
    wanted = [[0, 3], [4, 1]]
    expected = [capture_features(target, i, w) for i, w in zip(ids, wanted, strict=True)]
    before = hook_count(target)
    meet_in_layer(target, 1, parties=2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(capture_features, target, i, w) for i, w in zip(ids, wanted, strict=True)
        ]
        for job, right in zip(jobs, expected, strict=True):
            assert torch.equal(job.result(timeout=60), right)
    assert hook_count(target) == before


def test_a_plain_forward_in_another_thread_is_neither_captured_nor_cut_short(target):
    """Somebody else's pass through the same hooked layers runs to the logits."""
    ids = [make_ids(1), make_ids(2)]
    with torch.no_grad():
        logits = target(ids[1]).logits
    feature = capture_features(target, ids[0], [2])
    meet_in_layer(target, 1, parties=2)

    def plain():
        with torch.no_grad():
            return target(ids[1]).logits

    with ThreadPoolExecutor(2) as pool:
        capturing = pool.submit(capture_features, target, ids[0], [2])
        running = pool.submit(plain)
        assert torch.equal(capturing.result(timeout=60), feature)
        assert torch.equal(running.result(timeout=60), logits)


def test_threads_on_different_models_do_not_meet(target):
    """One thread per target device is the trainer's normal case."""
    targets = [target, make_target(LlamaForCausalLM)]
    expected = [capture_features(t, make_ids(), [1, 2]) for t in targets]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(capture_features, t, make_ids(), [1, 2]) for t in targets]
        for job, right in zip(jobs, expected, strict=True):
            assert torch.equal(job.result(timeout=60), right)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [([], "empty"), ([1, 1], "twice"), ([0, 5], r"\[5\] outside \[0, 4\]"), ([-1], r"\[-1\]")],
)
def test_impossible_layers_are_refused(target, wanted, said):
    """A negative id would silently mean another layer, 5 is a hidden_states index."""
    with pytest.raises(ValueError, match=said) as caught:
        capture_features(target, make_ids(), wanted)
    assert "\n" not in str(caught.value)


def test_decoder_layers_are_found_or_the_error_says_where_it_looked(target):
    """From the causal LM or its base model; a model without layers is named."""
    assert decoder_layers(target) is target.model.layers
    assert decoder_layers(target.model) is target.model.layers
    with pytest.raises(ValueError, match=r"Linear.*layers, h, blocks"):
        decoder_layers(nn.Linear(2, 2))


def test_a_layer_that_never_ran_is_an_error_not_garbage(target):
    """The buffer is uninitialised memory; a skipped layer must not leak it as a feature."""
    target.config.num_hidden_layers = 3  # transformers then runs the first three layers only
    with pytest.raises(RuntimeError, match=r"layers \[4\] did not run"):
        capture_features(target, make_ids(), [1, 4])
