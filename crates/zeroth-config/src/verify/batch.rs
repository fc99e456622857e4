//! Compares the file's three batch-size keys with the command's flags.

use super::command::TrainingCommand;
use super::finding::Disagreement;
use crate::check::Severity;
use crate::file_values::FileValues;
use crate::resolve::{BatchError, BatchSizes, triangulate};
use crate::view::ConfigView;

/// The largest number of ranks that `divisors` lists, more than any machine has.
const MOST_RANKS: u64 = 100_000;

const TRAIN: &str = "train_batch_size";
const MICRO: &str = "train_micro_batch_size_per_gpu";
const ACCUMULATION: &str = "gradient_accumulation_steps";

/// The batch sizes of the file and of the command.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes<'a> {
    file: &'a FileValues,
    command: &'a TrainingCommand,
    train: Option<u64>,
    micro: Option<u64>,
    accumulation: Option<u64>,
    given_micro: Option<u64>,
    given_accumulation: Option<u64>,
}

/// The result of comparing batch sizes.
#[derive(Debug, Default)]
pub(super) struct BatchOutcome {
    /// The disagreement, if any.
    pub(super) finding: Option<Disagreement>,
    /// The batch, if it is known and consistent.
    pub(super) batch: Option<BatchSizes>,
    /// Whether the finding already covers a mismatch of the micro-batch size.
    pub(super) covers_micro: bool,
}

impl<'a> Sizes<'a> {
    pub(super) fn new(file: &'a FileValues, command: &'a TrainingCommand) -> Self {
        let view = ConfigView::new(file);
        let given = |path: &str| view.integer(path).and_then(|value| u64::try_from(value).ok());
        Self {
            file,
            command,
            train: given(TRAIN),
            micro: given(MICRO),
            accumulation: given(ACCUMULATION),
            given_micro: command.script.flags.per_device_train_batch_size,
            given_accumulation: command.script.flags.gradient_accumulation_steps,
        }
    }

    /// Compares both sides. `or` holds the micro-batch size and accumulation to assume where neither side gives them.
    pub(super) fn compare(&self, or: (Option<u64>, Option<u64>)) -> BatchOutcome {
        let Some(ranks) = self.command.world.size else {
            return BatchOutcome { finding: self.unknown_world(), ..BatchOutcome::default() };
        };
        if self.command.trainer.compares() {
            return self.together(ranks, or, None);
        }
        // DeepSpeed sees only the file; the script decides what its flags mean.
        match triangulate(self.train, self.micro, self.accumulation, ranks) {
            Ok(alone) => self.together(ranks, or, Some(alone)),
            // accelerate takes the micro-batch from the script's data loader.
            Err(BatchError::NoneGiven) if self.command.accelerate.is_some() => self.together(ranks, or, None),
            Err(BatchError::NoneGiven) => {
                let named = [TRAIN, MICRO].iter().any(|path| self.file.get(path).is_some());
                let finding = (!named).then(|| self.none_given());
                BatchOutcome { finding, ..BatchOutcome::default() }
            }
            Err(error) => {
                let explained = self.explain(&error, (self.micro, self.accumulation), ranks, None);
                BatchOutcome {
                    finding: Some(self.finding(Severity::Error, explained)),
                    ..BatchOutcome::default()
                }
            }
        }
    }

    /// Checks the file's values, overridden by the command's, against DeepSpeed's batch-size rules.
    ///
    /// `alone` is the batch that DeepSpeed computes from the file if it does not see the command's flags.
    fn together(
        &self,
        ranks: u64,
        or: (Option<u64>, Option<u64>),
        alone: Option<BatchSizes>,
    ) -> BatchOutcome {
        let mut micro = self.given_micro.or(self.micro);
        let mut accumulation = self.given_accumulation.or(self.accumulation);
        if self.train.is_none() {
            micro = micro.or(or.0);
            accumulation = accumulation.or(or.1);
        }
        let error = match triangulate(self.train, micro, accumulation, ranks) {
            Ok(batch) => return BatchOutcome { batch: Some(batch), ..BatchOutcome::default() },
            Err(BatchError::NoneGiven) => return BatchOutcome::default(),
            Err(error) => error,
        };
        let differ = |file: Option<u64>, given: Option<u64>| {
            file.zip(given).is_some_and(|(file, given)| file != given)
        };
        let differs =
            differ(self.micro, self.given_micro) || differ(self.accumulation, self.given_accumulation);
        let file_fits = triangulate(self.train, self.micro, self.accumulation, ranks).is_ok();
        let is_global = self.given_micro.is_some() && self.given_micro == self.train;
        // A mismatch of a single value is clearer than the mismatch of the product.
        if differs && file_fits && !is_global {
            return BatchOutcome::default();
        }
        let explained = self.explain(&error, (micro, accumulation), ranks, alone);
        let severity = if alone.is_some() { Severity::Warning } else { Severity::Error };
        BatchOutcome {
            finding: Some(self.finding(severity, explained)),
            covers_micro: is_global,
            batch: None,
        }
    }

    fn finding(&self, severity: Severity, (message, fix): (String, String)) -> Disagreement {
        let path = [TRAIN, MICRO, ACCUMULATION].into_iter().find(|path| self.file.get(path).is_some());
        let location = path.and_then(|path| self.file.get(path)).map(|value| value.location);
        Disagreement { severity, key: path, location, message, fix }
    }

    /// The message and the fix, for the mistake that most likely caused the error.
    fn explain(
        &self,
        error: &BatchError,
        (micro, accumulation): (Option<u64>, Option<u64>),
        ranks: u64,
        alone: Option<BatchSizes>,
    ) -> (String, String) {
        let text = error.to_string();
        let said = text.lines().next().unwrap_or_default().trim_end_matches('.');
        let BatchError::Mismatch { fix, .. } = error else {
            return (said.to_owned(), "write smaller numbers".to_owned());
        };
        let then = match alone {
            None => format!("DeepSpeed stops ({said})"),
            Some(BatchSizes { train, micro, accumulation }) => format!(
                "DeepSpeed sees the file alone and makes {train} = {micro} × {accumulation} × {ranks} ranks of it, \
                 which is not what the command says"
            ),
        };
        let Some(train) = self.train else {
            return (then, fix.clone());
        };
        let steps = accumulation.unwrap_or(1).max(1);
        // If no micro-batch size is given, infer the one that the author of the file probably meant.
        let one = micro.or_else(|| train.is_multiple_of(steps).then_some(train / steps));
        let share = one.and_then(|one| one.checked_mul(steps));
        let whole = share.and_then(|share| share.checked_mul(ranks));
        if let (Some(one), Some(whole)) = (one, whole.filter(|_| ranks > 1)) {
            let all = format!("{one} × {steps} × {ranks} ranks = {whole}");
            if self.given_micro == Some(train) {
                return global_as_per_device(train, steps, ranks, (whole, &all), &then);
            }
            if share == Some(train) {
                return (
                    format!(
                        "the file's train_batch_size {train} is micro-batch {one} × accumulation {steps} and leaves \
                         out the {ranks} ranks. {then}; a script that multiplies by the ranks again trains \
                         another batch"
                    ),
                    format!(
                        "write train_batch_size {whole} ({all}), or \"auto\"; `zeroth config new --micro-batch-size \
                         {one} --gradient-accumulation {steps} --world-size {ranks} --overwrite` writes it"
                    ),
                );
            }
            if whole.checked_mul(ranks) == Some(train) {
                return (
                    format!(
                        "the file's train_batch_size {train} is {all}, multiplied by the {ranks} ranks again. \
                         {then}"
                    ),
                    format!("write train_batch_size {whole}, or \"auto\""),
                );
            }
        }
        (then, fix.clone())
    }

    fn none_given(&self) -> Disagreement {
        let message = "the file has neither train_batch_size nor train_micro_batch_size_per_gpu, and nothing in this \
                       command fills them: DeepSpeed stops (Either train_batch_size or \
                       train_micro_batch_size_per_gpu needs to be provided)";
        self.finding(Severity::Error, (message.to_owned(), "write train_micro_batch_size_per_gpu".to_owned()))
    }

    /// Lists the numbers of ranks that fit `train_batch_size`, for commands that do not give one.
    fn unknown_world(&self) -> Option<Disagreement> {
        let train = self.train?;
        let micro = self.given_micro.or(self.micro);
        let accumulation = self.given_accumulation.or(self.accumulation);
        let share = micro.unwrap_or(1).checked_mul(accumulation.unwrap_or(1)).filter(|share| *share > 0)?;
        let product = match (micro, accumulation) {
            (Some(micro), Some(steps)) => format!(" with micro-batch {micro} × accumulation {steps}"),
            (Some(micro), None) => format!(" with micro-batch {micro}"),
            (None, Some(steps)) => format!(" with accumulation {steps}"),
            (None, None) => String::new(),
        };
        let from = &self.command.world.from;
        if !train.is_multiple_of(share) {
            let message = format!("train_batch_size {train}{product} fits no number of ranks");
            let fix = format!("write train_batch_size {share} × the ranks, or \"auto\"");
            return Some(self.finding(Severity::Error, (message, fix)));
        }
        let worlds = match (micro, accumulation) {
            (Some(_), Some(_)) => (train / share).to_string(),
            _ => divisors(train / share),
        };
        let message = format!(
            "the file's train_batch_size {train}{product} fits these numbers of ranks: {worlds}. The command does not \
             say how many there are: it would be taken from {from}"
        );
        let fix = "say the number of ranks in the command, or write \"auto\" for train_batch_size".to_owned();
        Some(self.finding(Severity::Warning, (message, fix)))
    }

    /// Warns about `--batch_size`, which is per device in some scripts and global in others.
    pub(super) fn own_word(&self) -> Option<Disagreement> {
        let (flag, size) = self.command.script.own_batch.as_ref()?;
        let ranks = self.command.world.size;
        let batch =
            ranks.and_then(|ranks| triangulate(self.train, self.micro, self.accumulation, ranks).ok());
        let micro = self.micro.or(batch.map(|batch| batch.micro));
        let train = self.train.or(batch.map(|batch| batch.train));
        if micro.is_some() && micro == train && micro == Some(*size) {
            return None;
        }
        let again = ranks.map_or("the ranks".to_owned(), |ranks| format!("the {ranks} ranks"));
        let (key, meaning) = if train == Some(*size) {
            (
                TRAIN,
                format!(
                    "it is the file's train_batch_size; a script that takes it per device multiplies it by {again} again"
                ),
            )
        } else if micro == Some(*size) {
            (MICRO, "it is the file's micro-batch, which agrees if the script takes it per device".to_owned())
        } else {
            let says = |size: Option<u64>| size.map_or("none".to_owned(), |size| size.to_string());
            (
                TRAIN,
                format!(
                    "it is neither the micro-batch of the file ({}) nor its train_batch_size ({})",
                    says(micro),
                    says(train)
                ),
            )
        };
        let found = self.file.get(key);
        Some(Disagreement {
            severity: Severity::Warning,
            key: Some(key),
            location: found.map(|value| value.location),
            message: format!(
                "the command's {flag} {size} is the script's own word, for one device or for all of them: {meaning}"
            ),
            fix: "look up what the script means; per device it must be the micro-batch, for all it must be \
                  train_batch_size"
                .to_owned(),
        })
    }
}

fn global_as_per_device(
    train: u64,
    steps: u64,
    ranks: u64,
    (whole, all): (u64, &str),
    then: &str,
) -> (String, String) {
    let again = if steps == 1 {
        format!("the {ranks} ranks")
    } else {
        format!("accumulation {steps} and the {ranks} ranks")
    };
    let message = format!(
        "the command's per-device batch {train} is the file's whole train_batch_size, and would be multiplied by \
         {again} again: {all}. {then}"
    );
    let per_device = steps.checked_mul(ranks).filter(|by| train.is_multiple_of(*by)).map(|by| train / by);
    let keep = match per_device {
        Some(micro) => format!("for {train} samples a step write --per-device-train-batch-size {micro}; "),
        None => String::new(),
    };
    (message, format!("{keep}for {whole} write train_batch_size {whole}, or \"auto\""))
}

/// The divisors of a number, shortened: `1, 2, 4, 8, 16, … 4096 (13 in all)`.
fn divisors(number: u64) -> String {
    let all: Vec<u64> = (1..=number.min(MOST_RANKS)).filter(|ranks| number.is_multiple_of(*ranks)).collect();
    let show = |list: &[u64]| list.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let reach = if number > MOST_RANKS { format!("up to {MOST_RANKS}") } else { "in all".to_owned() };
    match all.as_slice() {
        [first @ .., last] if first.len() > 8 => {
            format!("{}, … {last} ({} {reach})", show(&first[..7]), all.len())
        }
        all => show(all),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_listed_and_long_lists_shortened() {
        assert_eq!(divisors(1), "1");
        assert_eq!(divisors(64), "1, 2, 4, 8, 16, 32, 64");
        assert_eq!(divisors(360), "1, 2, 3, 4, 5, 6, 8, … 360 (24 in all)");
        // 2^64 - 1 = 3 · 5 · 17 · 257 · 641 · 65537 · 6700417: the search stops at MOST_RANKS.
        assert!(divisors(u64::MAX).ends_with("… 65537 (24 up to 100000)"), "{}", divisors(u64::MAX));
    }
}
