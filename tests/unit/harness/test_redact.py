"""What may be written down of an environment and a command line."""

from __future__ import annotations

import pytest

from harness import redact


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "--api-key", "keyFile", "WANDB_API_KEY", "PGPASSWORD", "hub.token", "apikey"],
)
def test_a_name_that_promises_a_secret_is_known(name):
    assert redact.is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "--num-keys", "tokenizer", "monkey", "AUTHOR", "PWD", "--lr"]
)
def test_an_ordinary_name_is_not_taken_for_one(name):
    assert not redact.is_secret_name(name)


def test_only_listed_switches_of_the_environment_are_shown():
    shown = redact.environment(
        {
            "TORCH_LOGS": "recompiles",
            "CUDA_VISIBLE_DEVICES": "0",
            "HF_TOKEN": "not-for-you",
            "TORCH_HUB_TOKEN": "nor-this",
            "HOME": "/home/somebody",
        }
    )
    assert shown == {"CUDA_VISIBLE_DEVICES": "0", "TORCH_LOGS": "recompiles"}


def test_values_of_secret_arguments_are_masked_and_the_rest_stays():
    argv = ["train.py", "--token", "abcdef", "--lr", "1", "hub.key=xyz", "--flag", "--secret=s"]
    assert redact.arguments(argv) == [
        *("train.py", "--token", "***", "--lr", "1", "hub.key=***", "--flag", "--secret=***")
    ]


def test_a_secret_flag_before_another_option_hides_nothing_else():
    assert redact.arguments(["x", "--auth", "--lr", "1"]) == ["x", "--auth", "--lr", "1"]


@pytest.mark.parametrize(
    "text", ["hf_abcdefghijkl", "ghp_0123456789abcdef01", "https://me:pass@host/x"]
)
def test_what_looks_like_a_token_is_masked_wherever_it_stands(text):
    assert "***" in redact.arguments([text])[0]


def test_a_secret_is_struck_out_of_all_text_that_is_written():
    clean = redact.Redactor({"MY_TOKEN": "s3cret-value"}, ["x", "--password=another-one"])
    data = {"a": ["the value s3cret-value", ("another-one", 3)], "n": None}
    assert clean.data(data) == {"a": ["the value ***", ["***", 3]], "n": None}


def test_a_short_value_is_not_struck_out_of_ordinary_words():
    assert redact.Redactor({"MY_KEY": "id"}).text("identity") == "identity"
