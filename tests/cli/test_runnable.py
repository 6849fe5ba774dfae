"""What cannot be run is said by the commands that price it."""

from click.testing import CliRunner

from foretell.cli.predict import command

MOE = "gpt:layers=2,hidden=64,heads=4,seq=32,vocab=128"


def test_predict_says_what_is_not_run():
    for plan, is_said in (("dp=2", False), ("dp=2,offload=yes", True)):
        done = CliRunner().invoke(command, [MOE, "--on", "dgx-a100:gpus=2", "--plan", plan])
        assert done.exit_code == 0, done.output
        assert ("not run by `foretell run`: offload" in done.stderr) == is_said
