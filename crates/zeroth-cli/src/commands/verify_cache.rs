//! `checkpoint verify` of a teacher cache.

use std::path::Path;

use serde_json::json;
use zeroth::base::{counted, format_bytes, grouped};
use zeroth::train::{TeacherCache, VerifiedCache};

use crate::exit::Exit;
use crate::output::{self, Colour, Output};

pub(super) fn run(dir: &Path, output: &Output) -> anyhow::Result<Exit> {
    let VerifiedCache { manifest, bytes, took } = match TeacherCache::verify(dir) {
        Ok(verified) => verified,
        Err(error) => {
            let problem = error.to_string();
            if output.is_json() {
                output::json(&json!({"path": dir, "ok": false, "cache": null, "problems": [problem]}))?;
            } else {
                output::error(&problem);
            }
            return Ok(Exit::Problems);
        }
    };
    let (done, tokens) = (manifest.tokens_done, manifest.data.tokens);
    let has_checksums = manifest.checksums.is_some();
    if output.is_json() {
        output::json(&json!({
            "path": dir, "ok": true, "problems": [],
            "cache": {
                "tokens_done": done, "tokens": tokens, "checksums": has_checksums, "bytes": bytes,
                "seconds": took.as_secs_f64(),
            },
        }))?;
        return Ok(Exit::Done);
    }
    let compared = if has_checksums {
        "verified"
    } else {
        "read, without checksums to compare with (the same `zeroth distill cache` command adds them),"
    };
    let rest = if done < tokens { "; the same `zeroth distill cache` command continues it" } else { "" };
    output::text(&format!(
        "{} {}: {} of {}, {} {compared} in {:.2} s{rest}\n",
        output.coloured(Colour::Green, "ok"),
        dir.display(),
        grouped(done),
        counted(tokens, "token"),
        format_bytes(bytes),
        took.as_secs_f64()
    ));
    Ok(Exit::Done)
}
