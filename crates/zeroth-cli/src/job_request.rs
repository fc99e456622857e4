//! What the flags of `train` and `plan` ask for, as plain data.

use zeroth::job::{
    DataRequest, DistillRequest, JobRequest, PairLengths, PairRequest, ParameterCount, PlanOptions,
    ReadingRequest,
};
use zeroth::machine::known_gpu;
use zeroth::plan::States;

use crate::cli::{PlanArgs, StatesArg, TrainArgs};
use crate::commands::{render_templates, strategies};
use crate::kd_args::{KdArgs, PlanTeacherArgs, TailArg};
use crate::pair_args::{PairArgs, PairLengthArgs};
use crate::train_args::{ReadingArgs, TruncationArg};
use crate::value_args::TrainTypeArg;

/// A request, with notes on flags that have no effect on it.
pub(crate) struct FlagRequest {
    pub(crate) request: JobRequest,
    pub(crate) notes: Vec<String>,
}

impl TrainArgs {
    /// The job that is asked for. Flags that contradict each other are refused.
    pub(crate) fn job_request(&self) -> anyhow::Result<FlagRequest> {
        let is_lora = self.lora.train_type()? == TrainTypeArg::Lora;
        strategies::check(self)?;
        anyhow::ensure!(self.do_train, "--do-train false leaves nothing to do: leave it out");
        let kd_notes = self.kd.check()?;
        let mut notes: Vec<String> = self.without_effect.notes().collect();
        notes.extend(strategies::idle_flags(self));
        notes.extend(self.idle_flags());
        notes.extend(kd_notes);
        if !is_lora {
            notes.extend(self.lora.notes_of_full()?);
        }
        let request = JobRequest {
            model: self.model.clone(),
            deepspeed: self.deepspeed.clone(),
            flags: self.train.to_flags(is_lora, None)?,
            precision_of_model: self.train.is_precision_of_model(),
            data: self.data_request(),
            epochs: self.num_train_epochs,
            shuffle: self.shuffle,
            seed: self.seed,
            data_seed: self.trainer.data_seed,
            strategies: strategies::request(self),
            lora: is_lora.then(|| self.lora.request()).transpose()?,
            distillation: self.kd.distils().then(|| self.kd.request()),
            random_weights: self.lora.random_weights,
            max_skipped_steps: self.max_skipped_steps,
            save_dtype: self.trainer.save_dtype.map(Into::into),
            output: self.output.clone(),
            resume: self.resume.clone(),
            run_name: self.trainer.run_name.clone(),
            device: self.device.map(Into::into),
            ranks: self.ranks,
            threads_per_rank: self.threads_per_rank,
            device_memory: self.device_memory,
            host_memory: self.host_memory,
        };
        Ok(FlagRequest { request, notes })
    }

    fn data_request(&self) -> DataRequest {
        let evaluates = strategies::evaluates(self);
        DataRequest {
            paths: self.data.clone(),
            evaluation_paths: if evaluates { self.eval_data.clone() } else { Vec::new() },
            split_ratio: self.evaluation.split_ratio(),
            reading: self.reading.request(&self.pairs),
            packing: self.packing,
            max_samples: self.max_train_samples,
            evaluation_micro_batch: self.evaluation.per_device_eval_batch_size,
        }
    }

    /// Notes on flags that others make idle.
    fn idle_flags(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.trainer.logging_dir.is_some() && self.report_to.iter().all(|name| name == "none") {
            notes.push("--logging-dir has no effect without --report-to tensorboard or csv".to_owned());
        }
        if self.trainer.data_seed.is_some() && !self.shuffle && self.evaluation.split_ratio().is_none() {
            notes.push("--data-seed has no effect with --shuffle false".to_owned());
        }
        if !self.eval_data.is_empty() && !strategies::evaluates(self) {
            notes.push("--eval-data is not read: --eval-strategy is no".to_owned());
        }
        notes
    }
}

impl PlanArgs {
    /// The job to plan, and how it is planned. LoRA's flags of a full training are those of the LoRA run that it may suggest.
    pub(crate) fn job_request(&self) -> anyhow::Result<(JobRequest, PlanOptions)> {
        let is_lora = self.lora.train_type_or_full()? == TrainTypeArg::Lora;
        if !is_lora {
            self.lora.check_full()?;
        }
        let lora = self.lora.request()?;
        let (ranks, ranks_per_host) = self.on_hosts.ranks(self.ranks)?;
        let parameters = self.params.filter(|_| self.model.is_none());
        let options = PlanOptions {
            every_preset: self.deepspeed.is_none(),
            parameters: parameters.map(|total| ParameterCount { total, largest_layer: self.largest_layer }),
            card: self.card.as_deref().map(known_gpu).transpose()?,
            ranks_per_host,
            states: self.states.map(StatesArg::states),
            suggested_lora: lora.clone(),
        };
        let model = self.model.clone().unwrap_or_default();
        let mut request = JobRequest::new(model, Vec::new(), "");
        if let Some(config) = &self.deepspeed {
            request.deepspeed.clone_from(config);
        }
        let reading = &mut request.data.reading;
        (reading.max_length, reading.pairs.lengths) = (self.rows.max_length, self.lengths.request());
        let request = JobRequest {
            flags: self.train.to_flags(is_lora, None)?,
            precision_of_model: self.train.is_precision_of_model(),
            lora: is_lora.then_some(lora),
            distillation: self.teacher.request(),
            device: self.device.map(Into::into),
            ranks,
            threads_per_rank: self.threads_per_rank,
            device_memory: self.device_memory,
            host_memory: self.host_memory,
            ..request
        };
        Ok((request, options))
    }
}

impl StatesArg {
    fn states(self) -> States {
        match self {
            Self::Master => States::Master,
            Self::Plain => States::Plain,
            Self::Run => States::Run,
        }
    }
}

impl PlanTeacherArgs {
    /// What is distilled from. The share of the loss, its temperature and its divergence change no bytes.
    fn request(&self) -> Option<DistillRequest> {
        let kd = KdArgs {
            teacher: self.teacher.clone(),
            teacher_deepspeed: self.teacher_deepspeed.clone(),
            teacher_quantize: self.teacher_quantize,
            kd_cache: self.kd_cache.clone(),
            ..KdArgs::default()
        };
        kd.distils().then(|| kd.request())
    }
}

impl ReadingArgs {
    pub(crate) fn request(&self, pairs: &PairArgs) -> ReadingRequest {
        ReadingRequest {
            columns: self.columns.clone(),
            system: self.system.clone(),
            max_length: self.rows.max_length,
            truncation: match self.truncation_strategy {
                TruncationArg::Delete => zeroth::data::Truncation::Drop,
                TruncationArg::Left => zeroth::data::Truncation::Left,
                TruncationArg::Right => zeroth::data::Truncation::Right,
            },
            pairs: pairs.request(),
            template_command: Some(render_templates::COMMAND),
        }
    }
}

impl PairArgs {
    pub(crate) fn request(&self) -> PairRequest {
        PairRequest {
            source_prefix: self.source_prefix.clone(),
            source_lang: self.source_lang.clone(),
            target_lang: self.target_lang.clone(),
            lengths: self.lengths.request(),
        }
    }
}

impl PairLengthArgs {
    pub(crate) fn request(self) -> PairLengths {
        PairLengths { source: self.max_source_length, target: self.max_target_length }
    }
}

impl KdArgs {
    fn request(&self) -> DistillRequest {
        DistillRequest {
            teacher: self.teacher.clone(),
            teacher_deepspeed: self.teacher_deepspeed.clone(),
            teacher_quantized: self.teacher_quantize.is_some(),
            alpha: self.alpha(),
            temperature: self.kd_temperature,
            beta: self.kd_beta,
            squared: self.kd_squared,
            cache: self.kd_cache.clone(),
            tail: self.kd_tail != Some(TailArg::Renormalize),
        }
    }
}
