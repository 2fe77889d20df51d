"""How tests are divided among the workers of pytest-xdist: by file, the longest files first."""

from pathlib import Path

HERE = Path(__file__).parents[1]

# files that share a slow fixture are run by one worker: two workers import torch_xla, and one makes the long runs; two
# clusters of Ray at once take several times as long
TOGETHER = {
    **dict.fromkeys(
        [
            "test_ray_train.py",
            "experimental/cluster/test_ray_pool.py",
            "lab/comparison/test_compare_executors.py",
        ],
        "Ray",
    ),
    **dict.fromkeys(
        [
            "promises/test_same_result_on_any_number_of_cores.py",
            "promises/test_spmd_devices_train_as_one_process.py",
            "promises/test_same_bits_on_any_number_of_xla_cores.py",
            "test_train_mnist.py",
            "cores/test_launch.py",
        ],
        "XLA",
    ),
    **dict.fromkeys(
        [
            "promises/test_what_was_decided_can_be_replayed.py",
            "promises/test_tokens_weigh_the_same_on_any_number_of_cores.py",
            "promises/test_gradients_are_the_users_until_step.py",
            "promises/test_stopped_is_never_stopped.py",
            "runs/test_log.py",
            "runs/test_log_metrics.py",
            "optim/test_optimizer_missing_gradients.py",
            "optim/test_seeding.py",
            "optim/test_token_weights.py",
            "optim/test_consistency_in_threads.py",
            "optim/gradients/test_traced_programs.py",
            "optim/gradients/test_traced.py",
            "optim/gradients/test_fixed_point.py",
            "optim/gradients/test_fixed_point_traced.py",
            "optim/gradients/test_accumulator_over_cores.py",
            "lab/comparison/test_train.py",
        ],
        "more of XLA",
    ),
}

# slow files, which a worker must not start last, because the others would wait for it; those that wait most are first,
# while others compute
LONGEST = [
    "test_ray_train.py",
    "promises/test_what_was_decided_can_be_replayed.py",
    "promises/test_same_result_on_any_number_of_cores.py",
    "promises/test_killed_runs_resume.py",
    "lab/comparison/test_report_page_in_a_browser.py",
    "data/test_stream.py",
    "test_docs_site.py",
    "test_first_minutes.py",
    "test_documentation.py",
    "test_typing.py",
    "lab/comparison/test_compare.py",
    "promises/test_stopped_at_random.py",
    "integrations/test_transformers.py",
    "runs/test_checkpoint_forked_runs.py",
    "optim/test_policy_driver.py",
    "promises/test_sharded_models_train_as_plain_ones.py",
    "optim/gradients/test_fsdp.py",
    "runs/test_remote.py",
    "optim/test_flow.py",
    "cores/test_signals.py",
    "promises/test_two_optimizers_train_as_by_hand.py",
    "data/test_stream_state.py",
    "schedules/test_permutation.py",
    "lab/planning/test_profile_recorded.py",
    "test_reproduce.py",
    "runs/test_sharded_state.py",
    "promises/test_same_bits_on_any_number_of_cores.py",
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
