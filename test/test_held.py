"""Hold: a process is found at the moment at which it is held, however late the test looks, and can be killed there."""

import os
import signal
import time

import forked
import pytest
from held import Hold

from variable_batch_size.files import write_text


def write_three(hold, folder):
    hold.at_rename(".txt.tmp", number=2)
    for number in range(3):
        write_text(folder / "other.json", "{}")
        write_text(folder / f"{number}.txt", "0123456789")
    (folder / "ended").touch()


def test_a_process_is_held_before_its_second_rename_with_half_a_file_until_it_is_killed(tmp_path):
    hold = Hold(tmp_path / "hold")
    leader = forked.Leader(write_three, hold, tmp_path, environment={})
    time.sleep(0.5)  # the moment would have passed long ago
    assert hold.wait(leader.poll) == [leader.pid]
    os.kill(leader.pid, signal.SIGKILL)
    assert leader.wait() == -signal.SIGKILL
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {
        "other.json": "{}",
        "0.txt": "0123456789",
        "1.txt.tmp": "01234",
    }


def count(hold, path):
    hold.here()
    path.touch()


def test_held_processes_continue_when_they_are_released_and_later_ones_are_not_held(tmp_path):
    hold, paths = Hold(tmp_path / "hold"), [tmp_path / name for name in "abc"]
    leaders = [forked.Leader(count, hold, path, environment={}) for path in paths[:2]]
    assert hold.wait(number=2) == sorted(leader.pid for leader in leaders)
    assert not any(path.exists() for path in paths)
    hold.release()
    assert [leader.wait() for leader in leaders] == [0, 0]
    count(hold, paths[2])
    assert all(path.exists() for path in paths)
    hold.again()
    again = forked.Leader(count, hold, tmp_path / "d", environment={})
    assert hold.wait() == [again.pid]
    hold.release()
    assert again.wait() == 0


def test_a_process_that_ends_before_it_is_held_is_reported(tmp_path):
    leader = forked.Leader(os.getpid, environment={})
    leader.wait()
    with pytest.raises(AssertionError, match="it has ended with code 0"):
        Hold(tmp_path).wait(lambda: f"it has ended with code {leader.poll()}")
