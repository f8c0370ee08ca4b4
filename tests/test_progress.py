"""Progress bars don't block anything."""

from tests.processes import run_script


def test_a_child_killed_while_it_holds_the_lock_of_bars_blocks_no_other_process():
    """tqdm's own lock would be held forever: it is shared with forked children."""
    script = """
        import os, signal
        from offload.progress import Bar, progress, progress_in_bytes

        list(progress([1], "before"))
        pid = os.fork()
        if not pid:
            with progress_in_bytes(1, "of the child"):
                Bar.get_lock().acquire()
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        print(list(progress([1], "after")))
    """

    assert "[1]\n" == run_script(script)
