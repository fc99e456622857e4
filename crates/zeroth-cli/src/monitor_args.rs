//! Flags of `monitor`.

use std::path::PathBuf;

use clap::Args;

use crate::value_args::whole_as;

#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  zeroth monitor runs/first\n  zeroth monitor runs/first runs/second --web\n\n\
                  Reads run folders and writes nothing. Keys: 1 to 4 or Tab switch the page, n selects the next run, j and k \
                  scroll, q leaves. Where standard output is not a terminal it prints a summary once; with --format json, \
                  everything as one object.\n\n\
                  --web listens on 127.0.0.1 only. The URL printed is valid once; the browser that opens it keeps a cookie. \
                  `/metrics` serves Prometheus' text format to `Authorization: Bearer TOKEN`."
)]
pub(crate) struct MonitorArgs {
    /// Run folders: the --output of `zeroth train`; several are overlaid
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Serve a page on loopback instead of the terminal
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub(crate) web: bool,
    /// Port of the page [default: a free one]
    #[arg(long, value_name = "N", value_parser = whole_as::<u16>(0..=65_535), requires = "web")]
    pub(crate) port: Option<u16>,
    /// Process of the run that opened this view: Ctrl-C is passed on to it
    #[arg(long, value_name = "PID", value_parser = whole_as::<u32>(0..), hide = true)]
    pub(crate) of_run: Option<u32>,
}
