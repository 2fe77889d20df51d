"""How tests are divided among the workers of pytest-xdist: by file, the longest files first."""

from pathlib import Path

HERE = Path(__file__).parents[1]

# files that share a slow fixture are run by one worker
TOGETHER = {
    "promises/test_stopped_is_never_stopped.py": "long runs",
    "runs/test_log.py": "long runs",
    "runs/test_log_metrics.py": "long runs",
}

# slow files, which a worker must not start last, because the others would wait for it
LONGEST = [
    "comparison/test_executors.py",
    "promises/test_same_result_on_any_number_of_cores.py",
    "promises/test_spmd_devices_train_as_one_process.py",
    "integrations/test_ray.py",
    "optim/test_missing_gradients.py",
    "promises/test_same_bits_on_any_number_of_xla_cores.py",
    "promises/test_killed_runs_resume.py",
    "promises/test_tokens_weigh_the_same_on_any_number_of_cores.py",
    "promises/test_stopped_is_never_stopped.py",
    "promises/test_sharded_models_train_as_plain_ones.py",
    "comparison/test_compare.py",
    "test_documentation.py",
    "test_train_mnist.py",
    "promises/test_what_was_decided_can_be_replayed.py",
    "promises/test_gradients_are_the_users_until_step.py",
    "promises/test_two_optimizers_train_as_by_hand.py",
    "cores/test_launch.py",
    "runs/test_remote.py",
    "test_first_minutes.py",
    "test_reproduce.py",
    "test_docs_site.py",
    "comparison/test_train.py",
    "comparison/test_report_page_in_a_browser.py",
    "test_typing.py",
    "promises/test_same_bits_on_any_number_of_cores.py",
    "runs/test_sharded_state_files.py",
    "optim/gradients/test_fsdp.py",
]


def group_of(path):
    """The name of the group of a file, which one worker runs."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.as_posix()
    return TOGETHER.get(name, name)


def longest_first(items):
    """The tests, starting with those of the slowest files and their groups."""
    places = {group_of(HERE / path): place for place, path in reversed(list(enumerate(LONGEST)))}
    return sorted(items, key=lambda item: places.get(group_of(item.path), len(LONGEST)))


def scheduler(config, log):
    """A scheduler that assigns all tests of a group to one worker, in collection order."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(config.rootpath / super()._split_scope(nodeid))

    return ByGroup(config, log)
