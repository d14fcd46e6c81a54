"""Keys of runs that validate by sampling every second step, for tests of validation beside training."""

SAMPLED_VALIDATIONS = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.8",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "trainer.val_before_train=true",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
)
