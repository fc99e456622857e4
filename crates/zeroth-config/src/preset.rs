//! The presets that `--deepspeed NAME` and `config presets` know: ms-swift's six, with overlap_comm true.
//!
//! Overlap is on, since here it changes no bit of the result.

use zeroth_base::nearest;

use crate::read::ConfigSource;

/// A named config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// The name for --deepspeed.
    pub name: &'static str,
    /// What it shards and where state lives, in one sentence.
    pub about: &'static str,
    /// The text of the config file.
    pub text: &'static str,
}

/// All presets, from the least sharded to the most.
pub const PRESETS: [Preset; 6] = [
    Preset {
        name: "zero0",
        about: "nothing is sharded: plain data parallelism",
        text: include_str!("../presets/zero0.json"),
    },
    Preset {
        name: "zero1",
        about: "optimizer state is sharded across ranks",
        text: include_str!("../presets/zero1.json"),
    },
    Preset {
        name: "zero2",
        about: "optimizer state and gradients are sharded",
        text: include_str!("../presets/zero2.json"),
    },
    Preset {
        name: "zero2_offload",
        about: "as zero2, with optimizer state in host memory",
        text: include_str!("../presets/zero2_offload.json"),
    },
    Preset {
        name: "zero3",
        about: "optimizer state, gradients and parameters are sharded",
        text: include_str!("../presets/zero3.json"),
    },
    Preset {
        name: "zero3_offload",
        about: "as zero3, with optimizer state and parameters in host memory",
        text: include_str!("../presets/zero3_offload.json"),
    },
];

/// No preset has that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no preset is called `{name}`; {}", match near {
    Some(near) => format!("did you mean `{near}`?"),
    None => "there are zero0, zero1, zero2, zero2_offload, zero3 and zero3_offload".to_owned(),
})]
pub struct UnknownPreset {
    /// The name as it was typed.
    pub name: String,
    /// The preset likely meant.
    pub near: Option<&'static str>,
}

impl Preset {
    /// The preset of this name.
    pub fn find(name: &str) -> Result<&'static Self, UnknownPreset> {
        PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| UnknownPreset {
            name: name.to_owned(),
            near: nearest(name, PRESETS.iter().map(|preset| preset.name)),
        })
    }

    /// The preset as a source to read, named as --deepspeed names it.
    pub fn source(&self) -> ConfigSource {
        ConfigSource::from_text(self.name, self.text)
    }
}
