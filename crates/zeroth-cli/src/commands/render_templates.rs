//! The hidden command that renders chat templates, and encoders that start it.

use std::path::Path;

use anyhow::Context;
use zeroth::data::{Encoder, EncoderOptions, render_templates};

use crate::exit::Exit;

/// Its name.
pub(crate) const COMMAND: &str = "render-chat-templates";

/// An encoder that renders the folder's chat template in processes of their own.
pub(super) fn encoder(folder: &Path, options: EncoderOptions) -> anyhow::Result<Encoder> {
    let program =
        std::env::current_exe().context("this program cannot find itself to render chat templates")?;
    Ok(Encoder::open(folder, options)?.rendering_in(program, &[COMMAND]))
}

pub(super) fn run() -> anyhow::Result<Exit> {
    render_templates().context("conversations cannot be read, or texts not written")?;
    Ok(Exit::Done)
}
