import pytest

from dsa_compile.cli.generate import main


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["art"], "one of the arguments --prompt --prompt-ids --prompt-file --input is required"),
        (["--prompt-ids", "1"], "required: MODEL"),
        (["art", "--prompt-ids", "1 x"], "--prompt-ids takes integers such as"),
        (["art", "--prompt-ids", " "], "--prompt-ids takes integers such as"),
        (["art", "--prompt", "hi"], "text needs a tokenizer"),
        (["art", "--prompt-ids", "1", "--prompt", "a"], "not allowed with argument"),
        (["art", "--prompt-ids", "1", "--json", "--stream"], "not allowed with argument"),
        (["art", "--prompt-ids", "1", "--top-p", "2"], "top_p must be a number in (0, 1]; got 2.0"),
        (["art", "--prompt-ids", "1", "--max-num-seqs", "0"], "--max-num-seqs must be an integer"),
        (["art", "--prompt-ids", "1", "--top-p", "x"], "--top-p: invalid float value: 'x'"),
        (["art", "--prompt-ids", "1", "--stop", "x"], "stop needs a tokenizer"),
        (["art", "--prompt-ids", "1", "--bogus"], "unrecognized arguments: --bogus"),
        (["art", "--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["art", "--prompt", "a", "--no-thinking"], "--thinking needs --chat"),
        (["art", "--prompt", "a", "--separator", "b"], "--separator needs --prompt-file"),
        (["art", "--prompt-ids", "1", "--chat"], "--chat takes texts; leave out --prompt-ids"),
        (["art", "--input", "a"], "--input needs --output"),
        (["art", "--prompt", "a", "--output", "b"], "--output needs --input"),
        (["art", "--prompt", "-", "-"], "--prompt - reads all of standard input; give it once"),
        (["missing", "--prompt-ids", "1"], "missing: no such directory"),
        (["art", "--prompt-file", "/no/such/file"], "cannot read --prompt-file /no/such/file: No"),
    ],
)
def test_user_errors_are_one_line_and_status_2(engine, capsys, command, message):
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dsa-generate: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"), [(b"\n \n", "has no prompts"), (b"\xff", "it is not UTF-8 text")]
)
def test_bad_prompt_files(engine, capsys, tmp_path, content, message):
    file = tmp_path / "prompts"
    file.write_bytes(content)
    assert main(["art", "--prompt-file", str(file)]) == 2
    assert message in capsys.readouterr().err
