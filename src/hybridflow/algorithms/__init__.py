"""The maths: pure functions of tensors. No configuration, no I/O, no batch object; what they need is in their arguments.

    advantages/      token rewards -> advantages, returns          one estimator a file, one literal table
    policy_losses/   log-probs, advantages -> loss                 one loss a file, one literal table
    value_loss, entropy, kl                                        the other terms, and the KL controllers
    aggregation      token losses -> one number, by counts handed in
    masked           means, variance and whitening under a mask

Everything computes in float32 or better (float64 stays float64) and gives 0 where the mask is false, whatever stands there.
"""
