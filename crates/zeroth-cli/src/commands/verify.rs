//! `config verify`: checks that a training command agrees with a config.

use zeroth::config::checked::CheckedConfig;
use zeroth::config::verify::{Severity, verify};

use crate::cli::VerifyArgs;
use crate::exit::Exit;
use crate::output::{self, Colour, Output};

pub(super) fn run(arguments: &VerifyArgs, output: &Output) -> anyhow::Result<Exit> {
    let checked = CheckedConfig::load(&arguments.file)?;
    let name = checked.document.source.name();
    let verification = verify(&checked.report.values, name, &arguments.command);
    // Warnings do not affect the exit code.
    let exit = if verification.has_errors() { Exit::Problems } else { Exit::Done };
    if output.is_json() {
        output::json(&verification.to_json())?;
        return Ok(exit);
    }
    for finding in &verification.findings {
        let error = finding.severity == Severity::Error;
        let (level, colour) = if error { ("error", Colour::Red) } else { ("warning", Colour::Yellow) };
        let location = finding.location.map(|location| format!("  {name}: {location}\n")).unwrap_or_default();
        let title = output.coloured(colour, level);
        output::text(&format!("{title}: {}\n{location}  {}\n\n", finding.message, finding.fix));
    }
    let compared = verification.compared.join("; ");
    output::text(&if exit == Exit::Done {
        format!("{name} and the command agree: {compared}\n")
    } else {
        format!("{name} and the command do not agree; compared: {compared}\n")
    });
    Ok(exit)
}
