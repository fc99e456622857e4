//! Sampling flags of `generate`, with the meaning that Hugging Face's `generate` gives them.

use zeroth::train::Generation;

use crate::generate_flags::SamplingArgs;
use crate::output;

/// The sampling parameters. `--do-sample` decides between sampling and greedy decoding; without it, a temperature above 0
/// does.
pub(super) fn generation(
    arguments: &SamplingArgs,
    max_new_tokens: u64,
    stops: &[i32],
) -> anyhow::Result<Generation> {
    let temperature = match (arguments.do_sample, arguments.temperature) {
        (Some(true), Some(0.0)) => anyhow::bail!(
            "--do-sample true contradicts --temperature 0: give a temperature above 0, or --do-sample false for greedy \
             decoding"
        ),
        (Some(true), given) => given.unwrap_or(1.0),
        (Some(false), _) => 0.0,
        (None, given) => given.unwrap_or(0.0),
    };
    anyhow::ensure!(
        arguments.num_return_sequences == 1 || temperature > 0.0,
        "--num-return-sequences {} asks for different texts, and greedy decoding gives one, as a beam search does here: give \
         --do-sample true, or a --temperature above 0",
        arguments.num_return_sequences
    );
    let generation = Generation {
        max_new_tokens,
        temperature,
        top_k: arguments.top_k.filter(|top_k| *top_k > 0),
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        repetition_penalty: arguments.repetition_penalty,
        seed: arguments.seed,
        stops: stops.to_vec(),
    };
    if temperature == 0.0 {
        let unused = [
            ("--temperature", arguments.temperature.is_some_and(|given| given != 0.0)),
            ("--top-k", generation.top_k.is_some()),
            ("--top-p", arguments.top_p.is_some_and(|top_p| top_p != 1.0)),
            ("--min-p", arguments.min_p.is_some_and(|min_p| min_p != 0.0)),
        ];
        let unused: Vec<&str> =
            unused.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name).collect();
        if !unused.is_empty() {
            let remedy = match arguments.do_sample {
                Some(_) => "--do-sample true samples",
                None => "--do-sample true or a --temperature above 0 samples",
            };
            output::note(&format!(
                "note: {} without effect: decoding is greedy; {remedy}",
                match unused[..] {
                    [one] => format!("{one} is"),
                    _ => format!("{} are", unused.join(", ")),
                }
            ));
        }
    }
    Ok(generation)
}
