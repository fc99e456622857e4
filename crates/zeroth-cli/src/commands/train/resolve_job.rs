//! Resolves the command line into a job, and shows what takes time.

use std::sync::{Mutex, PoisonError};

use zeroth::base::{counted, grouped};
use zeroth::data::Prepared;
use zeroth::job::{self, LauncherHandoff, ResolveEvent, ResolvedJob, StartedRanks};
use zeroth::train::ReportTo;

use super::trainer_note::Compared;
use crate::cli::TrainArgs;
use crate::job_request::FlagRequest;
use crate::output;
use crate::run_file;
use crate::terminal::Meter;

/// Resolves the command line. Ranks pass the `handoff` of their launcher.
pub(super) fn resolve_job(
    arguments: &TrainArgs,
    started: Option<StartedRanks>,
    handoff: Option<LauncherHandoff>,
) -> anyhow::Result<ResolvedJob> {
    let FlagRequest { request, notes } = arguments.job_request()?;
    report_to(arguments)?;
    let watch = Watch { is_lora: request.lora.is_some(), meter: Mutex::new(None), notes: Mutex::new(notes) };
    let mut resolved_job = job::resolve(&request, started, handoff, &|event| watch.handle(&event))?;
    let mut notes = watch.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
    notes.append(&mut resolved_job.notes);
    resolved_job.notes = notes;
    Ok(resolved_job)
}

/// The reports of `--report-to`.
pub(super) fn report_to(arguments: &TrainArgs) -> anyhow::Result<Vec<ReportTo>> {
    Ok(ReportTo::parse(arguments.report_to.iter().map(String::as_str))?)
}

/// Shows the progress of tokenisation, and keeps notes that depend on the command line.
struct Watch {
    is_lora: bool,
    meter: Mutex<Option<Meter>>,
    notes: Mutex<Vec<String>>,
}

impl Watch {
    fn handle(&self, event: &ResolveEvent<'_>) {
        match event {
            ResolveEvent::Config { file, resolved, ranks } => {
                let compared = Compared {
                    file,
                    is_lora: self.is_lora,
                    micro_batch: resolved.values.top_level.train_micro_batch_size_per_gpu,
                    ranks: *ranks,
                };
                let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
                notes.extend(compared.notes(run_file::for_ranks()));
            }
            ResolveEvent::Note(note) => output::note(&format!("note: {note}")),
            ResolveEvent::Tokenising(done) => {
                // Skip the update if another thread is printing.
                if let Ok(mut meter) = self.meter.try_lock() {
                    let meter = meter.get_or_insert_with(|| Meter::new("tokenising"));
                    meter.tell(done.bytes, done.total_bytes, || Some(format!("{} rows", grouped(done.rows))));
                }
            }
            ResolveEvent::Tokenised(prepared) => {
                drop(self.meter.lock().unwrap_or_else(PoisonError::into_inner).take());
                print_summary(prepared);
            }
        }
    }
}

fn print_summary(prepared: &Prepared) {
    for (folder, error) in &prepared.unusable {
        output::note(&format!(
            "note: the token cache in {} cannot be used, so tokens are kept for this run only: {error}",
            folder.display()
        ));
    }
    if !prepared.found {
        output::note(&format!(
            "{} read and tokenised in {:.1} s",
            counted(prepared.rows, "row"),
            prepared.seconds
        ));
    }
}
