"""Commands of verl's own examples, word by word but for folders, data and trackers.

DENSE_GRPO       examples/grpo_trainer/run_qwen2-7b.sh, which serves its model over two devices; with SGLANG
                 it is run_qwen2-7b_sgl.sh but for sizes

For Megatron:

DENSE_PPO        examples/ppo_trainer/run_qwen2-7b_megatron.sh
MOE_GRPO         examples/grpo_trainer/run_qwen3moe-30b_megatron.sh, which also gives the model in
                 Megatron's form, by dist_checkpointing_path
MOE_DAPO         examples/grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh
"""

FLAGS = ("--config-path=config", "--config-name=ppo_megatron_trainer.yaml")

DENSE_GRPO = """
algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""

SGLANG = "actor_rollout_ref.rollout.name=sglang"

DENSE_PPO = """
data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=512
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4
actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
critic.optim.lr=1e-5 critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32
critic.megatron.pipeline_model_parallel_size=4 critic.megatron.virtual_pipeline_model_parallel_size=2
critic.megatron.tensor_model_parallel_size=4
algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0
trainer.n_gpus_per_node=16 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=10 trainer.total_epochs=15
"""

MOE_GRPO = """
algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=1024
data.max_response_length=2048 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
actor_rollout_ref.actor.megatron.use_dist_checkpointing=True
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4
actor_rollout_ref.ref.megatron.expert_model_parallel_size=4
actor_rollout_ref.ref.megatron.use_dist_checkpointing=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0
trainer.n_gpus_per_node=8 trainer.nnodes=4 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""

MOE_DAPO = """
data.prompt_key=prompt data.truncation=left data.max_prompt_length=2048 data.max_response_length=8192
data.train_batch_size=512 actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo
algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0
+actor_rollout_ref.model.override_config.model_config.max_position_embeddings=10240
actor_rollout_ref.model.use_fused_kernels=False actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240 actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.lr_decay_style=constant
actor_rollout_ref.actor.optim.weight_decay=0.1
+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1.
+actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True
+actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer=True
+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
actor_rollout_ref.actor.megatron.use_dist_checkpointing=False
actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.grad_offload=True
actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null
actor_rollout_ref.actor.megatron.context_parallel_size=1
actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
+actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.masked_softmax_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.bias_activation_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.bias_dropout_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.deallocate_pipeline_outputs=True
+actor_rollout_ref.actor.megatron.override_transformer_config.persist_layer_norm=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type="flex"
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=10240
actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.tensor_model_parallel_size=4
actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=10240
actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0
actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.top_k=-1
actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.free_cache_engine=True actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=10240
actor_rollout_ref.ref.megatron.use_dist_checkpointing=False actor_rollout_ref.ref.megatron.param_offload=True
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1
actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1
actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size=null
actor_rollout_ref.ref.megatron.context_parallel_size=1
actor_rollout_ref.ref.megatron.expert_model_parallel_size=8
actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=1 reward_model.reward_manager=dapo
+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
+reward_model.reward_kwargs.overlong_buffer_cfg.log=False +reward_model.reward_kwargs.max_resp_len=8192
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.val_before_train=False trainer.test_freq=10
trainer.save_freq=100 trainer.total_epochs=10 trainer.resume_mode=auto trainer.log_val_generations=10
"""
