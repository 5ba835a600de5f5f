"""Text of anyone's data is shown on a terminal, and not followed."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from recbft.datasets import Dataset
from recbft.errors import visible
from recbft.reporting.progress import listener, view_for
from recbft_cli.terminal import say
from tests.cli.conftest import run

EVIL = "a\x1b]0;mine\x07\x1b[2J\x9b31m\x7f\u202e.csv"
SHOWN = r"a\x1b]0;mine\x07\x1b[2J\x9b31m\x7f\u202e"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def is_shown(text):
    return SHOWN in text and not any(sign in text for sign in "\x07\x9b\x7f\u202e")


def test_lines_and_letters_stay_and_signs_are_spelt_out(capsys):
    assert visible("größer 日本\n\x1b[31mred\r\tx\udce9") == "größer 日本\n\\x1b[31mred\\r\\tx\\udce9"
    say("\x1b[31mred", err=True)
    say()
    assert capsys.readouterr() == ("\n", "\\x1b[31mred\n")


def test_a_data_set_s_name_is_shown(capsys, tmp_path):
    file = tmp_path / EVIL
    file.write_text("user_id,item_id\n" + "".join(f"{user},{item}\n" for user in range(4) for item in range(4)))
    assert EVIL.startswith(Dataset.load(file).name)
    code, out, _ = run(capsys, "data", "show", file)
    assert code == 0 and is_shown(out) and "\x1b" not in out


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_listeners_say_is_shown(stream):
    one, queue = stream(), stream()
    listener(True, "ndcg@10", one).note(EVIL)
    view = view_for(queue)
    view.failed(SimpleNamespace(job=SimpleNamespace(name=EVIL), reason="it failed"))
    assert all(is_shown(heard.getvalue().replace("\n", "")) for heard in (one, queue))
