from dataclasses import replace

from molt_gym.trainers.rollout.ticket import Ticket

TICKET = Ticket(index=3, group=5, rollout=2, seed=7, step=1)


def test_a_seed_depends_on_run_group_rollout_and_what_else_is_given():
    others = [replace(TICKET, seed=8), replace(TICKET, group=6), replace(TICKET, rollout=3)]
    seeds = [TICKET.derive(0, 0), *(other.derive(0, 0) for other in others), TICKET.derive(0, 1), TICKET.derive(1, 0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_when_a_rollout_is_played_does_not_change_its_seeds():
    later = replace(TICKET, step=9)
    assert later.derive(1, 2) == TICKET.derive(1, 2) and later.env_seed == TICKET.env_seed


def test_the_env_is_seeded_alike_for_all_rollouts_of_a_group():
    assert replace(TICKET, rollout=0).env_seed == TICKET.env_seed
    assert len({replace(TICKET, group=group, seed=seed).env_seed for group in range(20) for seed in range(20)}) == 400
