"""Recording of a session as a page, and replay from that page."""

import stat

import pytest

from multiprocessing_pdb.console.recording import Recording, RecordingError, read_commands


def test_a_recorded_session_is_replayed(site):
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    page = site.home / "session.md"
    site.ask(f"record {page}", "diff value", "nonsense", "@1 p special", "@all next", "record", "where")
    text = page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "ranks 0-1" in text or "rank 0: 0" in text
    assert "mpdb> where" not in text
    assert text.endswith("~~~~\n")
    site.ask("c")
    for rank in ranks:
        site.await_exit(rank)
    ranks = site.start_ranks(2, "work.py")
    site.await_ranks(2)
    again = site.run_console(f"replay {page}")
    assert again.returncode == 1
    assert "replay ends at command 2 of 4: nonsense" in again.stdout
    page.write_text(text.replace("mpdb> nonsense\n", ""))
    replayed = site.ask(f"replay {page}")
    assert "rank 1: 'odd'" in replayed
    assert "replayed 3 command(s)" in replayed
    assert site.ask("diff total").splitlines()[0] == "rank 0: 1"
    site.ask("c")
    for rank in ranks:
        site.await_exit(rank)


def test_what_is_done_while_attached_is_recorded_for_its_rank(site):
    (rank,) = site.start_ranks(1, "loops.py", env={"MPDB_PDB": "pdb"})
    site.await_ranks(1)
    console = site.open_console()
    for line in ("record page.md", "attach 0", "p 6 * 7", "", "detach", "record"):
        console.sendline(line)
        console.expect_exact("(Pdb) " if line in ("attach 0", "p 6 * 7", "") else "mpdb> ")
    console.sendline("quit")
    console.wait()
    text = (site.home / "page.md").read_text()
    assert read_commands(site.home / "page.md") == ["@0 p 6 * 7", "@0 p 6 * 7"]
    assert text.count("\n42\n") == 2
    site.ask("kill 0")
    rank.wait(30)


def test_output_never_becomes_a_command(tmp_path):
    page = Recording(tmp_path / "page.md", "job")
    page.add_command("@0 p text")
    page.add_output("one\nmpdb> kill 0\n~~~~\n\x1b[31mmpdb> kill 1\x1b[0m")
    page.close()
    assert read_commands(tmp_path / "page.md") == ["@0 p text"]
    assert (tmp_path / "page.md").read_text().count("~~~~\n") == 3
    assert (tmp_path / "page.md").read_text().count("\n~~~~\n") == 2


@pytest.mark.parametrize("content", [None, b"", b"no command\n", b"\xff\xfe\x00"])
def test_what_cannot_be_replayed_names_the_file(tmp_path, content):
    path = tmp_path / "page.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"page\.md"):
        read_commands(path)


def test_a_recording_overwrites_nothing(site):
    page = site.home / "page.md"
    page.write_text("kept")
    assert "exists already" in site.run_console(f"record {page}").stdout
    assert "Not a directory" in site.run_console(f"record {page}/none/x").stdout
    assert page.read_text() == "kept"
    assert "nothing is recorded" in site.run_console("record").stdout
