//! The hidden command that renders chat templates, and encoders that use it.

use std::path::Path;

use anyhow::Context;
use zeroth::data::{Encoder, EncoderOptions, render_templates};

use crate::exit::Exit;

/// The command's name.
pub(crate) const COMMAND: &str = "render-chat-templates";

/// An encoder that renders the folder's chat template in worker processes.
pub(super) fn encoder(folder: &Path, options: EncoderOptions) -> anyhow::Result<Encoder> {
    let program = std::env::current_exe().context("cannot find this executable to render chat templates")?;
    Ok(Encoder::open(folder, options)?.rendering_in(program, &[COMMAND]))
}

pub(super) fn run() -> anyhow::Result<Exit> {
    render_templates().context("cannot read conversations or write the rendered text")?;
    Ok(Exit::Done)
}
