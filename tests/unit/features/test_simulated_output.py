"""The output of one simulated rank: its beginning, its end, and the number of what is between."""

from allranks.features.simulate.output import RankOutput


def test_the_end_of_a_line_that_is_too_long_is_shown(tmp_path):
    output = RankOutput(str(tmp_path / "rank-0.log"), limit_nbytes=400, ranks=1)
    output.write("out", "before\n")
    output.write("out", "x" * 1000 + "end\n")
    entries, lines, nbytes = output.take(final=True)
    end = "x" * 96 + "end\n"
    assert entries == [["out", "before\n"], ["hidden", 0, 904], ["out", end]]
    assert (lines, nbytes) == (0, 904)
    assert (tmp_path / "rank-0.log").read_text() == "before\n" + "x" * 1000 + "end\n"
