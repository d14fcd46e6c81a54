"""The maths: pure functions of tensors. No configuration, no I/O, no batch object; what they need is in their
arguments.

    catalog              names -> functions, what they read, formulas, papers; read without torch
    advantages/          token rewards -> advantages, returns      one estimator a file
    policy_losses/       log-probs, advantages -> loss             one loss a file
    preference.py        numbers of two responses -> loss
    value_loss, positive_examples, kl, divergence                  the other terms, and the KL controllers
    rollout_correction   two policies -> weights, rejection, metrics
    process_reward       PRIME's rewards of tokens, and the loss of their model
    resampling           scores -> rows drawn with replacement
    aggregation          token losses -> one number, by counts handed in; means and whitening under a mask

Everything computes in float32 or better (float64 stays float64) and gives 0 where the mask is false, whatever
stands there.
"""
