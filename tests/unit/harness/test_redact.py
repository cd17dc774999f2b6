"""What may be written down of an environment and a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import redact


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "--api-key", "keyFile", "WANDB_API_KEY", "PGPASSWORD", "hub.token", "apikey"),
        *("MYSQL_PWD", "GITHUB_PAT", "SLACK_WEBHOOK_URL", "CI_JOB_JWT"),
    ],
)
def test_a_name_that_promises_a_secret_is_known(name):
    assert redact.is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "--num-keys", "tokenizer", "monkey", "AUTHOR", "PWD", "OLDPWD", "PATH", "--lr"],
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
    ("text", "shown"),
    [
        ("hf_abcdefghijkl", "***"),
        ("ghp_0123456789abcdef01", "***"),
        ("github_pat_0123456789abcdef01", "***"),
        ("https://me:pass@host/x", "https://***@host/x"),
        ("--url=https://h/x?a=1&token=abc&b=2", "--url=https://h/x?a=1&token=***&b=2"),
        ("https://h/x?X-Amz-Signature=0f&y=1", "https://h/x?X-Amz-Signature=***&y=1"),
        ("Authorization: Bearer abcdefgh12345=", "Authorization: Bearer ***"),
    ],
)
def test_what_looks_like_a_token_is_masked_wherever_it_stands(text, shown):
    assert redact.arguments([text]) == [shown]
    assert redact.Redactor({}).text(f"<{text}>") == f"<{shown}>"


@pytest.mark.parametrize("text", ["task-scheduler-1", "disk-cleaner", "shf_abcdefghijkl"])
def test_a_word_that_only_ends_like_a_token_is_left_alone(text):
    assert redact.Redactor({}).text(text) == text


def test_an_object_is_written_as_its_text_without_the_secret():
    clean = redact.Redactor({"MY_TOKEN": "s3cret-value"})
    assert clean.data({"path": Path("a/s3cret-value"), "ok": True, "n": 1.5}) == {
        **{"path": "a/***", "ok": True, "n": 1.5}
    }


def test_a_secret_is_struck_out_of_all_text_that_is_written():
    clean = redact.Redactor({"MY_TOKEN": "s3cret-value"}, ["x", "--password=another-one"])
    data = {"a": ["the value s3cret-value", ("another-one", 3)], "n": None}
    assert clean.data(data) == {"a": ["the value ***", ["***", 3]], "n": None}


def test_a_short_value_is_not_struck_out_of_ordinary_words():
    assert redact.Redactor({"MY_KEY": "id"}).text("identity") == "identity"
