"""How tests are divided among the workers of pytest-xdist: by file, the longest files first."""

from pathlib import Path

HERE = Path(__file__).parent

# files that share a fixture which takes long are run by one worker
TOGETHER = {
    "promises/test_stopped_is_never_stopped.py": "long runs",
    "runs/test_log.py": "long runs",
    "runs/test_metrics.py": "long runs",
}

# those that a worker must not begin last, as the others would wait for it
LONGEST = [
    "comparison/test_executors.py",
    "promises/test_same_result_on_any_number_of_cores.py",
    "promises/test_spmd_devices_train_as_one_process.py",
    "integrations/test_ray.py",
    "promises/test_same_bits_on_any_number_of_xla_cores.py",
    "promises/test_killed_runs_go_on.py",
    "promises/test_tokens_weigh_the_same_on_any_number_of_cores.py",
    "promises/test_stopped_is_never_stopped.py",
    "promises/test_sharded_models_train_as_plain_ones.py",
    "comparison/test_compare.py",
    "test_documentation.py",
    "runs/test_train_mnist.py",
    "promises/test_what_was_decided_can_be_replayed.py",
    "promises/test_gradients_are_the_users_until_step.py",
    "cores/test_launch.py",
    "runs/test_object_store.py",
    "test_first_minutes.py",
    "test_reproduce.py",
    "test_docs_site.py",
    "comparison/test_train.py",
    "comparison/test_page_in_a_browser.py",
    "test_typing.py",
    "promises/test_same_bits_on_any_number_of_cores.py",
    "runs/test_sharded_files.py",
    "training/test_sharded_gradients.py",
]


def group_of(path):
    """The name of what a worker runs in one go, by the path of a file."""
    name = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else path.as_posix()
    return TOGETHER.get(name, name)


def longest_first(items):
    """The tests, with those of the longest files, and of files that are run with these, before the others."""
    places = {group_of(HERE / path): place for place, path in reversed(list(enumerate(LONGEST)))}
    return sorted(items, key=lambda item: places.get(group_of(item.path), len(LONGEST)))


def scheduler(config, log):
    """One that gives workers all tests of a group, in the order in which they were collected."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return group_of(config.rootpath / super()._split_scope(nodeid))

    return ByGroup(config, log)
