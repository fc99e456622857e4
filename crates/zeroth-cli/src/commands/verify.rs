//! `config verify`: does a training command agree with a file?

use zeroth::config::verify::{FindingSeverity, verify};

use super::config_file;
use crate::cli::VerifyArgs;
use crate::exit::Exit;
use crate::output::{Colour, Output};

pub(super) fn run(arguments: &VerifyArgs, output: &Output) -> anyhow::Result<Exit> {
    let checked = config_file::load(&arguments.file)?;
    let name = checked.document.source.name();
    let verification = verify(&checked.report.asked, name, &arguments.command);
    let exit = if verification.agrees { Exit::Done } else { Exit::Problems };
    if output.is_json() {
        output.json(&verification.to_json())?;
        return Ok(exit);
    }
    for finding in &verification.findings {
        let (level, colour) = match finding.severity {
            FindingSeverity::Error => ("error", Colour::Red),
            FindingSeverity::Warning => ("warning", Colour::Yellow),
        };
        let place = finding.place.map(|place| format!("  {name}: {place}\n")).unwrap_or_default();
        let title = output.coloured(colour, level);
        output.text(&format!("{title}: {}\n{place}  {}\n\n", finding.message, finding.fix));
    }
    let compared = verification.compared.join("; ");
    output.text(&if verification.agrees {
        format!("{name} and the command agree: {compared}\n")
    } else {
        format!("{name} and the command do not agree; compared: {compared}\n")
    });
    Ok(exit)
}
