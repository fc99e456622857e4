//! Realistic commands compared with realistic config files.

use proptest::prelude::*;

use super::*;
use crate::check::check;
use crate::preset::PRESETS;
use crate::read::{ConfigSource, Location, parse};

/// The config that the course's generator writes for `ZeroConfig(micro_batch_size=1, gradient_accumulation=16)`. Its
/// `train_batch_size` omits the ranks.
const GENERATED: &str = r#"{
  "train_batch_size": 16,
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "none", "pin_memory": false},
    "overlap_comm": true,
    "contiguous_gradients": true
  },
  "bf16": {"enabled": true},
  "gradient_accumulation_steps": 16,
  "steps_per_print": 50,
  "gradient_clipping": 1.0
}"#;

/// A config for 4 ranks, from `config new --micro-batch-size 2 --gradient-accumulation 8 --world-size 4`.
const FOUR_RANKS: &str = r#"{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 8,
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3},
  "bf16": {"enabled": true}
}"#;

fn file_values(text: &str) -> FileValues {
    check(&parse(ConfigSource::from_text("ds.json", text)).unwrap()).values
}

fn preset(name: &str) -> String {
    PRESETS.iter().find(|preset| preset.name == name).unwrap().text.to_owned()
}

/// Verifies `ds.json` with this text against a command in shell syntax.
fn run(text: &str, command: &str) -> Verification {
    verify(&file_values(text), "ds.json", &[command.to_owned()])
}

fn messages(found: &Verification) -> String {
    let texts: Vec<String> =
        found.findings.iter().map(|finding| format!("{}\n  -> {}\n", finding.message, finding.fix)).collect();
    texts.concat()
}

/// Returns the finding, which must be the only one.
fn only(found: &Verification) -> &Disagreement {
    assert_eq!(found.findings.len(), 1, "{}", messages(found));
    &found.findings[0]
}

fn keys(found: &Verification) -> Vec<&'static str> {
    found.findings.iter().filter_map(|finding| finding.key).collect()
}

#[test]
fn world_size_is_read_from_every_launcher() {
    use LauncherProgram::{Accelerate, DeepSpeed, Mpirun, Other, Python, Srun, Swift, Torchrun, Zeroth};
    for (command, launcher, size) in [
        ("deepspeed --num_gpus=1 translation/run_translation.py --deepspeed ds.json", DeepSpeed, Some(1)),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", DeepSpeed, Some(4)),
        ("deepspeed --num-gpus 8 --num_nodes 2 --master_port 29501 train.py", DeepSpeed, Some(16)),
        ("deepspeed --include localhost:0,1,3 train.py", DeepSpeed, Some(3)),
        ("deepspeed -i worker-0:0,1@worker-1:2,2,3 --module pkg.train", DeepSpeed, Some(4)),
        ("deepspeed -i worker-0@worker-1:0 train.py", DeepSpeed, None),
        ("deepspeed -e worker-1:0 -H hosts train.py", DeepSpeed, None),
        ("deepspeed -H hosts --num_gpus 8 train.py", DeepSpeed, None),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed train.py", DeepSpeed, Some(2)),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 4 train.py", DeepSpeed, Some(4)),
        ("deepspeed --no_python --bind_cores_to_rank --num_accelerators 2 swift sft", DeepSpeed, Some(2)),
        ("deepspeed --num_gpus $N train.py", DeepSpeed, None),
        ("torchrun train.py", Torchrun, Some(1)),
        ("torchrun --nproc_per_node=5 swift sft --model Qwen/Qwen3-8B", Torchrun, Some(5)),
        ("torchrun --standalone --nproc-per-node 8 --nnodes=2:2 train.py", Torchrun, Some(16)),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", Torchrun, None),
        ("torchrun --nproc_per_node gpu train.py", Torchrun, None),
        ("CUDA_VISIBLE_DEVICES=0,2,-1,1 torchrun --nproc_per_node auto train.py", Torchrun, Some(2)),
        ("python -u -m torch.distributed.run --nproc_per_node=3 -m pkg.train --x 1", Torchrun, Some(3)),
        (
            "python3.11 -W ignore -m torch.distributed.launch --use_env --nproc_per_node 2 train.py",
            Torchrun,
            Some(2),
        ),
        ("accelerate launch --num_processes 8 --num_machines 2 --multi_gpu train.py", Accelerate, Some(8)),
        ("accelerate launch --config_file acc.yaml train.py", Accelerate, None),
        ("accelerate launch train.py", Accelerate, None),
        ("NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --deepspeed ds.json", Swift, Some(4)),
        ("NPROC_PER_NODE=8 NNODES=2 NODE_RANK=0 swift rlhf --rlhf_type gkd", Swift, Some(16)),
        ("swift pt --deepspeed ds.json", Swift, Some(1)),
        ("env NNODES=2 nohup swift sft", Swift, Some(2)),
        ("zeroth train --ranks 4 --deepspeed ds.json", Zeroth, Some(4)),
        ("./target/release/zeroth train --num_gpus=2", Zeroth, Some(2)),
        ("zeroth train --nproc-per-node 3", Zeroth, Some(3)),
        ("zeroth train --model m", Zeroth, None),
        ("python train.py", Python, Some(1)),
        ("WORLD_SIZE=4 RANK=0 python train.py", Python, Some(4)),
        ("mpirun -np 4 zeroth train --deepspeed ds.json", Mpirun, Some(4)),
        ("mpirun --allow-run-as-root --mca btl tcp,self -x PATH -n 6 python train.py", Mpirun, Some(6)),
        ("mpiexec zeroth train", Mpirun, None),
        ("srun -n 8 zeroth train", Srun, Some(8)),
        ("srun -N2 --ntasks-per-node=4 -pgpu --label python train.py", Srun, Some(8)),
        ("SLURM_NTASKS=3 srun python train.py", Srun, Some(3)),
        ("srun -N 2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc_per_node 8 train.py", Torchrun, Some(16)),
        ("bash run.sh", Other, None),
        ("FORCE_TORCHRUN=1 llamafactory-cli train a.yaml", Other, None),
    ] {
        let found = run("{}", command);
        assert_eq!((found.launcher, found.world.size), (launcher, size), "{command}: {}", found.world.from);
    }
}

#[test]
fn agreement_lists_the_compared_values() {
    let found = run(
        FOUR_RANKS,
        "torchrun --nproc_per_node 4 train.py --deepspeed ./ds.json --per_device_train_batch_size 2 \
         --gradient-accumulation-steps=8 --bf16 True --max_grad_norm 1.0",
    );
    assert!(found.agrees, "{}", messages(&found));
    assert_eq!(found.summary(), "config ds.json; batch 64 = 2 × 8 × 4 ranks; bf16; clipping 1.0");
    let json = found.to_json();
    assert_eq!(json["agrees"], true);
    assert_eq!((json["launcher"].as_str(), json["world_size"].as_u64()), (Some("torchrun"), Some(4)));
    assert_eq!(json["compared"][1], "batch 64 = 2 × 8 × 4 ranks");
}

#[test]
fn t5_example_agrees_with_a_config_of_autos() {
    let command = "deepspeed --num_gpus=1 translation/run_translation.py \\\n--deepspeed config/ds.json \\\n\
                   --model_name_or_path t5-3b \\\n--per_device_train_batch_size 1 \\\n--output_dir output_dir \
                   --overwrite_output_dir --fp16 \\\n--do_train --max_train_samples 500 --num_train_epochs 1";
    let found = run(&preset("zero3_offload"), command);
    assert!(found.agrees, "{}", messages(&found));
    assert_eq!(found.summary(), "config ds.json; batch 1 = 1 × 1 × 1 rank; fp16");
}

#[test]
fn train_batch_size_that_omits_the_ranks_is_an_error_with_a_fix() {
    let found = run(GENERATED, "deepspeed --num_gpus=4 train.py --deepspeed ds.json");
    let finding = only(&found);
    assert_eq!((finding.severity, finding.key), (Severity::Error, Some("train_batch_size")));
    assert_eq!(finding.location, Some(Location { line: 2, column: 3 }));
    // DeepSpeed's own message: 16 samples divided by 4 ranks and 16 steps give a micro-batch of 0.
    assert!(
        finding.message.contains("train_batch_size is not equal to micro_batch_per_gpu"),
        "{}",
        finding.message
    );
    assert!(finding.message.contains("leaves out the 4 ranks"), "{}", finding.message);
    assert!(finding.fix.contains("write train_batch_size 64"), "{}", finding.fix);
    let generator = "zeroth config new --micro-batch-size 1 --gradient-accumulation 16 --world-size 4";
    assert!(finding.fix.contains(generator), "{}", finding.fix);
    let json = found.to_json();
    assert_eq!(json["findings"][0]["line"], 2);
    assert_eq!(json["findings"][0]["severity"], "error");
}

#[test]
fn train_batch_size_that_omits_the_ranks_is_an_error_with_trainer_flags() {
    let found = run(
        GENERATED,
        "deepspeed --num_gpus=8 train_hf.py --deepspeed ds.json --per_device_train_batch_size 1 \
         --gradient_accumulation_steps 16 --bf16 True --gradient_checkpointing True",
    );
    let finding = only(&found);
    assert!(finding.message.contains("16 != 1 * 16 * 8"), "{}", finding.message);
    assert!(finding.fix.contains("write train_batch_size 128"), "{}", finding.fix);
    assert_eq!(found.compared, ["config ds.json", "bf16", "clipping 1.0"]);
}

#[test]
fn train_batch_size_multiplied_by_the_ranks_twice_is_recognised() {
    let file = FOUR_RANKS.replace("64", "256");
    let found = run(&file, "deepspeed --num_gpus 4 train.py --deepspeed ds.json");
    let finding = only(&found);
    assert!(finding.message.contains("multiplied by the 4 ranks again"), "{}", finding.message);
    assert!(finding.fix.contains("write train_batch_size 64"), "{}", finding.fix);
}

#[test]
fn global_batch_size_given_per_device_is_recognised() {
    let found = run(
        FOUR_RANKS,
        "torchrun --nproc_per_node 4 t.py --deepspeed ds.json --per_device_train_batch_size 64 \
         --gradient_accumulation_steps 8 --bf16",
    );
    let finding = only(&found);
    assert!(
        finding.message.contains("multiplied by accumulation 8 and the 4 ranks again"),
        "{}",
        finding.message
    );
    assert!(finding.message.contains("64 × 8 × 4 ranks = 2048"), "{}", finding.message);
    assert!(finding.fix.contains("--per-device-train-batch-size 2"), "{}", finding.fix);
}

#[test]
fn other_batch_size_errors_quote_deepspeed() {
    let file =
        r#"{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 17, "gradient_accumulation_steps": 2}"#;
    let found = run(file, "deepspeed --num_gpus 2 train.py");
    assert!(only(&found).message.contains("33 != 17 * 2 * 2"), "{}", messages(&found));
    assert!(only(&found).fix.contains("68"), "{}", messages(&found));
    let found = run(r#"{"gradient_accumulation_steps": 4}"#, "deepspeed --num_gpus 2 train.py");
    assert!(only(&found).message.contains("Either train_batch_size or"), "{}", messages(&found));
}

#[test]
fn batch_size_flag_that_deepspeed_does_not_see_is_a_warning() {
    // 32 / 4 ranks / 8 steps = 1: DeepSpeed accepts the file, but the script computes 4 samples at a time.
    let file = r#"{"train_batch_size": 32, "gradient_accumulation_steps": 8}"#;
    let found = run(file, "deepspeed --num_gpus 4 train.py --micro_batch_size 4");
    assert_eq!(only(&found).severity, Severity::Warning);
    assert!(only(&found).message.contains("makes 32 = 1 × 8 × 4 ranks of it"), "{}", messages(&found));
    assert!(only(&found).fix.contains("write train_batch_size 128"), "{}", messages(&found));
}

#[test]
fn different_gradient_accumulation_is_an_error() {
    let found = run(
        FOUR_RANKS,
        "torchrun --nproc_per_node 4 t.py --deepspeed ds.json --per_device_train_batch_size 2 \
         --gradient_accumulation_steps 16 --bf16",
    );
    let finding = only(&found);
    assert_eq!((finding.severity, finding.key), (Severity::Error, Some("gradient_accumulation_steps")));
    assert_eq!(finding.location, Some(Location { line: 4, column: 3 }));
    let line = "ds gradient_accumulation_steps=8 vs hf gradient_accumulation_steps=16";
    assert!(finding.message.starts_with(line), "{}", finding.message);
}

#[test]
fn optimizer_and_scheduler_mismatches_are_worded_like_hugging_faces() {
    let file = r#"{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_clipping": 0.5,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 100}}
}"#;
    let found = run(
        file,
        "torchrun t.py --deepspeed ds.json --learning_rate 5e-5 --adam_beta1 0.8 --adam_epsilon 1e-6 --weight_decay 0.1 \
         --max_grad_norm 1.0 --warmup_steps 50 --lr_scheduler_type cosine",
    );
    let text = messages(&found);
    for line in [
        "ds gradient_clipping=0.5 vs hf max_grad_norm=1.0",
        "ds optimizer.params.lr=0.0001 vs hf learning_rate=5e-05",
        "ds optimizer.params.betas=[0.9, 0.999] vs hf adam_beta1+adam_beta2=[0.8, 0.999]",
        "ds optimizer.params.eps=1e-08 vs hf adam_epsilon=1e-06",
        "ds optimizer.params.weight_decay=0.01 vs hf weight_decay=0.1",
        "ds scheduler.params.warmup_max_lr=0.0001 vs hf learning_rate=5e-05",
        "ds scheduler.params.warmup_num_steps=100 vs hf warmup_steps=50",
        "ds scheduler.type=WarmupLR vs hf lr_scheduler_type=cosine",
    ] {
        assert!(text.contains(line), "{line} is missing in:\n{text}");
    }
    assert_eq!(found.findings.len(), 8, "{text}");
    let last = found.findings.last().unwrap();
    assert_eq!(
        (last.key, last.severity),
        (Some("scheduler.type"), Severity::Warning),
        "Hugging Face lets it pass"
    );
}

#[test]
fn trainer_defaults_apply_to_flags_that_are_not_given() {
    // The Trainer's defaults: batch 8, accumulation 1, max_grad_norm 1.0, neither bf16 nor fp16.
    let found = run(FOUR_RANKS, "torchrun --nproc_per_node 4 t.py --deepspeed ds.json --num_train_epochs 1");
    let text = messages(&found);
    assert!(found.findings.iter().all(|finding| finding.severity == Severity::Warning), "{text}");
    assert!(
        text.contains("ds train_micro_batch_size_per_gpu=2 vs hf per_device_train_batch_size=8"),
        "{text}"
    );
    assert!(text.contains("ds gradient_accumulation_steps=8 vs hf gradient_accumulation_steps=1"), "{text}");
    assert!(text.contains("ds bf16.enabled=True vs hf bf16|bf16_full_eval=False"), "{text}");
    assert_eq!(found.findings.len(), 3, "{text}");
    // In zeroth, the file overrides flags that are not given.
    let found = run(FOUR_RANKS, "zeroth train --ranks 4 --deepspeed ds.json");
    assert!(found.agrees, "{}", messages(&found));
}

#[test]
fn swift_accumulates_to_sixteen_samples_by_default() {
    // max(1, ceil(16 / 2 / 4)) = 2.
    let found =
        run(FOUR_RANKS, "NPROC_PER_NODE=4 swift sft --deepspeed ds.json --per_device_train_batch_size 2");
    assert!(
        messages(&found).contains("vs hf gradient_accumulation_steps=2 (a whole number at"),
        "{}",
        messages(&found)
    );
    let found = run(
        FOUR_RANKS,
        "NPROC_PER_NODE=4 swift sft --deepspeed ds.json --per_device_train_batch_size 2 \
         --gradient_accumulation_steps 8 --torch_dtype bfloat16",
    );
    assert!(found.agrees, "{}", messages(&found));
}

#[test]
fn swift_examples_name_presets_instead_of_the_file() {
    for (command, name) in [
        (
            "torchrun --nproc_per_node=5 swift sft --model Qwen/Qwen3-8B --train_type full --deepspeed zero3 \
             --per_device_train_batch_size 1 --gradient_accumulation_steps 16",
            "zero3",
        ),
        (
            "torchrun --nproc_per_node=5 swift sft --model Qwen/Qwen3-30B-A3B --train_type lora --deepspeed zero2 \
             --per_device_train_batch_size 2",
            "zero2",
        ),
    ] {
        let found = run(&preset(name), command);
        let message = format!("the command trains with the preset `{name}` (--deepspeed), not with ds.json");
        assert_eq!(only(&found).message, message);
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let same = verify(&file_values(&preset(name)), name, &words);
        assert!(same.agrees, "{}", messages(&same));
    }
}

#[test]
fn another_file_is_an_error_but_another_path_to_the_same_file_is_not() {
    for (named, same) in [
        ("ds.json", true),
        ("./ds.json", true),
        ("config/ds.json", true),
        ("other.json", false),
        ("ads.json", false),
        ("zero3_offload", false),
    ] {
        let found = run("{}", &format!("zeroth train --ranks 1 --deepspeed {named}"));
        assert_eq!(found.agrees, same, "{named}: {}", messages(&found));
    }
    let found =
        run("{}", "python t.py --deepspeed --deepspeed_config other.json --train_micro_batch_size_per_gpu 1");
    assert!(messages(&found).contains("`other.json` (--deepspeed_config)"), "{}", messages(&found));
}

#[test]
fn command_without_a_config_does_not_read_the_file() {
    let found = run(&preset("zero2"), "NPROC_PER_NODE=2 swift sft --per_device_train_batch_size 1");
    assert!(only(&found).message.contains("names no config"), "{}", messages(&found));
    let found = run(&preset("zero2"), "zeroth train --ranks 2");
    assert!(only(&found).message.contains("the preset `zero2`"), "{}", messages(&found));
}

#[test]
fn precision_mismatches_are_reported() {
    let fp16 = r#"{"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": true}}"#;
    let found = run(fp16, "torchrun t.py --deepspeed ds.json --per_device_train_batch_size 1 --bf16");
    assert_eq!(only(&found).key, Some("fp16.enabled"));
    assert!(only(&found).message.starts_with("ds fp16.enabled=True vs hf fp16|fp16_full_eval=False"));
    let found = run(FOUR_RANKS, "zeroth train --ranks 4 --deepspeed ds.json --bf16 False");
    assert_eq!(only(&found).key, Some("bf16.enabled"));
    let found = run(FOUR_RANKS, "zeroth train --ranks 4 --deepspeed ds.json --fp16 False");
    assert!(found.agrees, "{}", messages(&found));
    let found = run("{}", "zeroth train --ranks 4 --deepspeed ds.json --bf16 --fp16");
    assert!(only(&found).message.contains("--bf16 and --fp16"), "{}", messages(&found));
    let found = run(FOUR_RANKS, "deepspeed --num_gpus 4 train.py --dtype fp16");
    assert!(only(&found).message.contains("loads the weights in fp16"), "{}", messages(&found));
}

#[test]
fn auto_that_nothing_fills_is_a_warning() {
    let found = run(&preset("zero3"), "deepspeed --num_gpus 4 train.py --deepspeed ds.json");
    let text = messages(&found);
    assert_eq!(found.findings.len(), 2, "{text}");
    assert!(found.findings.iter().all(|finding| finding.severity == Severity::Warning), "{text}");
    assert!(text.contains("train_micro_batch_size_per_gpu are \"auto\""), "{text}");
    assert!(text.contains("DeepSpeed keeps the word and fails"), "{text}");
    assert!(text.contains("zero_optimization.stage3_prefetch_bucket_size (default 50000000)"), "{text}");
    for filled in [
        "deepspeed --num_gpus 4 train.py --deepspeed ds.json --per_device_train_batch_size 1",
        "accelerate launch --num_processes 4 --deepspeed_config_file ds.json train.py",
        "NPROC_PER_NODE=4 swift sft --deepspeed ds.json",
    ] {
        let found = run(&preset("zero3"), filled);
        assert!(found.agrees, "{filled}: {}", messages(&found));
    }
}

#[test]
fn activation_checkpointing_is_not_read_by_hugging_faces_trainer() {
    let file = r#"{"activation_checkpointing": {"cpu_checkpointing": true, "number_checkpoints": 8}}"#;
    let flags = "t.py --deepspeed ds.json --per_device_train_batch_size 1";
    let found = run(file, &format!("torchrun {flags} --gradient_checkpointing"));
    assert_eq!(
        (only(&found).key, only(&found).location.unwrap().line),
        (Some("activation_checkpointing"), 1)
    );
    assert!(only(&found).message.contains("recomputes in its own way"), "{}", messages(&found));
    let found = run(file, &format!("torchrun {flags}"));
    assert!(only(&found).fix.contains("--gradient_checkpointing"), "{}", messages(&found));
    let found = run(file, "zeroth train --ranks 1 --deepspeed ds.json --gradient-checkpointing");
    assert!(found.agrees, "{}", messages(&found));
}

#[test]
fn file_overrides_accelerate_flags() {
    let file = r#"{
  "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "fp16": {"enabled": true}
}"#;
    let launch = "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 8";
    let found = run(
        file,
        &format!(
            "{launch} --zero_stage 2 --offload_param_device none --gradient_accumulation_steps 4 \
             --gradient_clipping 1 --mixed_precision bf16 train.py"
        ),
    );
    assert_eq!(
        keys(&found),
        [
            "fp16.enabled",
            "gradient_accumulation_steps",
            "zero_optimization.stage",
            "zero_optimization.offload_param.device"
        ]
    );
    assert_eq!(found.findings[0].severity, Severity::Error, "accelerate refuses bf16 beside fp16");
    assert!(found.findings[1..].iter().all(|finding| finding.severity == Severity::Warning));
    let found = run(file, &format!("{launch} --zero_stage 3 --mixed_precision fp16 train.py"));
    assert!(found.agrees, "{}", messages(&found));
    assert_eq!(found.summary(), "config ds.json; batch 64 = 1 × 8 × 8 ranks; fp16; clipping 1.0");
    let found = run(file, &format!("{launch} --mixed_precision no train.py --gradient_accumulation_steps 4"));
    assert_eq!(keys(&found), ["gradient_accumulation_steps", "fp16.enabled"], "{}", messages(&found));
    assert!(
        !found.has_errors() && messages(&found).contains("accelerate takes the file's"),
        "{}",
        messages(&found)
    );
    let found = run(file, "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 8 train.py");
    assert!(messages(&found).contains("accelerate makes a config of its own"), "{}", messages(&found));
}

#[test]
fn unknown_world_size_lists_the_sizes_that_fit() {
    let file = r#"{"train_batch_size": 64}"#;
    let found = run(file, "torchrun --nproc_per_node gpu train.py");
    assert_eq!(only(&found).severity, Severity::Warning);
    assert!(only(&found).message.contains("1, 2, 4, 8, 16, 32, 64"), "{}", messages(&found));
    assert!(only(&found).message.contains("the GPUs found"), "{}", messages(&found));
    let found = run(FOUR_RANKS, "deepspeed train.py");
    assert!(only(&found).message.contains("micro-batch 2 × accumulation 8 fits these numbers of ranks: 4."));
    let found = run(FOUR_RANKS, "deepspeed train.py --train_micro_batch_size_per_gpu 3");
    assert!(
        found.has_errors() && messages(&found).contains("fits no number of ranks"),
        "{}",
        messages(&found)
    );
}

#[test]
fn ambiguous_batch_size_flag_is_a_warning() {
    for (command, said) in [
        ("--batch_size 64", "multiplies it by the 4 ranks again"),
        ("--train_batch_size=2", "agrees if the script takes it per device"),
        ("--batch-size 7", "neither the micro-batch of the file (2) nor its train_batch_size (64)"),
    ] {
        let found = run(FOUR_RANKS, &format!("deepspeed --num_gpus 4 train.py {command}"));
        assert_eq!(only(&found).severity, Severity::Warning);
        assert!(only(&found).message.contains(said), "{}", messages(&found));
    }
}

#[test]
fn what_cannot_be_compared_is_reported() {
    for command in ["", "torchrun --nproc_per_node 4", "NPROC_PER_NODE=4", "python -u"] {
        let found = run(GENERATED, command);
        assert!(found.has_errors() && only(&found).message.contains("starts no training"), "{command}");
    }
    let found = run("{}", "zeroth train --ranks 1 --deepspeed ds.json --max_grad_norm '$CLIP'");
    assert!(only(&found).message.contains("--max_grad_norm is `$CLIP`"), "{}", messages(&found));
    let found = run(GENERATED, "FORCE_TORCHRUN=1 llamafactory-cli train a.yaml");
    assert!(messages(&found).contains("settings from a.yaml"), "{}", messages(&found));
    let found = run("{}", "NPROC_PER_NODE=2 swift sft run.yaml");
    assert!(only(&found).message.contains("settings from run.yaml"), "{}", messages(&found));
}

/// A word as it occurs in commands.
fn word() -> impl Strategy<Value = String> {
    let words = [
        "deepspeed",
        "torchrun",
        "accelerate",
        "launch",
        "swift",
        "sft",
        "zeroth",
        "train",
        "python",
        "-m",
        "mpirun",
        "srun",
        "env",
        "--",
        "-",
        "=",
        "A=1",
        "NPROC_PER_NODE=4",
        "NNODES=1:2",
        "CUDA_VISIBLE_DEVICES=0,1",
        "-np",
        "-n4",
        "-N",
        "--num_gpus",
        "--num_gpus=18446744073709551615",
        "--num_nodes=9999999999",
        "--include",
        "a:0@b:",
        "--nproc_per_node",
        "--nnodes",
        "4",
        "0",
        "-1",
        "1e30",
        "auto",
        "t.py",
        "x.yaml",
        "--deepspeed",
        "ds.json",
        "zero3",
        "{",
        "--per_device_train_batch_size",
        "--gradient_accumulation_steps",
        "--batch_size=0",
        "--bf16",
        "--fp16",
        "False",
        "--learning_rate",
        "1e-5",
        "--adam_beta2",
        "0.9",
        "--warmup_ratio",
        "--max_steps",
        "2>&1",
        "--num_processes",
        "--mixed_precision",
        "fp16",
        "--zero_stage",
        "é",
        "-é",
    ];
    prop_oneof![9 => prop::sample::select(words.to_vec()).prop_map(str::to_owned), 1 => ".{0,4}"]
}

proptest! {
    #[test]
    fn no_command_panics(
        words in prop::collection::vec(word(), 0..12),
        file in prop::sample::select(vec![
            "{}".to_owned(), GENERATED.to_owned(), FOUR_RANKS.to_owned(), preset("zero3"),
            r#"{"train_batch_size": 9223372036854775807}"#.to_owned(),
        ]),
        joined: bool,
    ) {
        let command = if joined { vec![words.join(" ")] } else { words };
        let found = verify(&file_values(&file), "ds.json", &command);
        prop_assert_eq!(found.agrees, found.findings.is_empty());
        prop_assert!(found.findings.iter().all(|finding| !finding.message.is_empty() && !finding.fix.is_empty()));
        prop_assert!(found.world.size != Some(0));
        prop_assert_eq!(found.to_json()["findings"].as_array().map(Vec::len), Some(found.findings.len()));
    }
}
