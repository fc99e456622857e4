//! Watches runs: what `zeroth monitor` shows. It reads run folders and never writes into them.
//!
//! [`Run`] is the model of one folder, read incrementally with bounds on everything. [`watch`] shows runs in a terminal,
//! [`WebServer`] in a browser, [`report`] as text and [`snapshot`] as JSON.

mod curves;
mod event_history;
mod figures;
mod flat_json;
mod process;
mod report;
mod run;
mod series;
mod snapshot;
mod status;
mod tail;
mod terminal;
mod timeline;
mod web;

pub use event_history::HistoryEvent;
pub use report::report;
pub use run::{ListedCheckpoint, OpenError, PlannedTier, Run, RunSetting};
pub use snapshot::snapshot;
pub use status::{Health, MonitoredRank};
pub use terminal::{TerminalModes, ViewOptions, close_view, draw_once, is_stopped, watch};
pub use timeline::{Lane, Timeline, TimelineError};
pub use web::{WebError, WebServer};
