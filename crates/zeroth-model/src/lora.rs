//! LoRA: the small trainable matrices beside the linear maps of a frozen model, as peft places and names them.

use crate::error::did_you_mean;
use crate::table::{Parameter, ParameterKind, ParameterTable, Unit};
use zeroth_base::nearest;

/// Which adapters to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lora {
    /// Inner width of an adapter.
    pub rank: u64,
    /// The linear maps that get one.
    pub targets: LoraTargets,
}

/// The linear maps that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTargets {
    /// Every linear map except the output projection; experts and routers included.
    AllLinear,
    /// Those whose module has one of these names, or ends in one (`q_proj`, `self_attn.q_proj`).
    Named(Vec<String>),
}

impl LoraTargets {
    /// Reads what `--target-modules` lists: `all-linear`, or names.
    pub fn from_names(names: &[String]) -> Self {
        if names == ["all-linear"] { Self::AllLinear } else { Self::Named(names.to_vec()) }
    }
}

/// Adapters that cannot be added.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoraError {
    /// A rank of zero.
    #[error("a LoRA rank of 0 adds nothing: give 1 or more, 8 is usual")]
    Rank,
    /// A rank beyond the widest model.
    #[error("a LoRA rank of {rank} is larger than any matrix of the model ({most})")]
    RankTooLarge {
        /// The rank asked for.
        rank: u64,
        /// The longest side of a linear map.
        most: u64,
    },
    /// An empty list of names.
    #[error("no LoRA target modules are given: name some, or say all-linear")]
    NoTargets,
    /// A name that no module has.
    #[error("the LoRA target `{target}` matches no module of this model ({known}){}", did_you_mean(near.as_deref()))]
    NotFound {
        /// The name.
        target: String,
        /// The names that linear modules have.
        known: String,
        /// The one nearest to it.
        near: Option<String>,
    },
    /// A name of modules that are not linear maps.
    #[error("the LoRA target `{target}` is not a linear map ({module}); those are {known}")]
    NotLinear {
        /// The name.
        target: String,
        /// The first module it matches.
        module: String,
        /// The names that linear modules have.
        known: String,
    },
    /// The output projection of a model that shares it with the embedding.
    #[error("the LoRA target `{target}` is tied to {name}: this model has no matrix of its own there")]
    Tied {
        /// The name.
        target: String,
        /// The parameter it shares.
        name: String,
    },
}

/// The table of the adapters: for each targeted linear map `lora_A` [rank, in] and `lora_B` [out, rank], under the
/// names peft saves them by, in the units of the maps. Units without adapters are left out.
pub fn lora_table(base: &ParameterTable, lora: &Lora) -> Result<ParameterTable, LoraError> {
    check_rank(base, lora.rank)?;
    if let LoraTargets::Named(names) = &lora.targets {
        check_targets(base, names)?;
    }
    let units = base.units.iter().map(|unit| Unit {
        name: unit.name,
        parameters: unit
            .parameters
            .iter()
            .filter(|parameter| is_target(parameter, &lora.targets))
            .flat_map(|parameter| adapter(parameter, lora.rank))
            .collect(),
    });
    let units = units.filter(|unit| !unit.parameters.is_empty()).collect();
    Ok(ParameterTable { units, routing: None })
}

fn adapter(linear: &Parameter, rank: u64) -> [Parameter; 2] {
    let [out, input] = sides(linear);
    let name = |part: &str| format!("base_model.model.{}.{part}.weight", linear.module());
    [
        Parameter::new(name("lora_A"), vec![rank, input], ParameterKind::LoraA),
        Parameter::new(name("lora_B"), vec![out, rank], ParameterKind::LoraB),
    ]
}

/// [out, in] of a linear map.
fn sides(linear: &Parameter) -> [u64; 2] {
    linear.shape.as_slice().try_into().expect("tables give linear maps two sides")
}

fn is_target(parameter: &Parameter, targets: &LoraTargets) -> bool {
    parameter.kind.is_linear()
        && match targets {
            LoraTargets::AllLinear => parameter.kind != ParameterKind::Head,
            LoraTargets::Named(names) => names.iter().any(|name| matches(parameter.module(), name)),
        }
}

/// Whether a module is called `target`, or ends in it at a dot.
fn matches(module: &str, target: &str) -> bool {
    module.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

fn check_rank(base: &ParameterTable, rank: u64) -> Result<(), LoraError> {
    let linears = base.iter().filter(|parameter| parameter.kind.is_linear());
    let most = linears.flat_map(sides).max().unwrap_or(0);
    match rank {
        0 => Err(LoraError::Rank),
        rank if rank > most => Err(LoraError::RankTooLarge { rank, most }),
        _ => Ok(()),
    }
}

fn check_targets(base: &ParameterTable, targets: &[String]) -> Result<(), LoraError> {
    if targets.is_empty() {
        return Err(LoraError::NoTargets);
    }
    for target in targets {
        if base.iter().any(|parameter| parameter.kind.is_linear() && matches(parameter.module(), target)) {
            continue;
        }
        let target = target.clone();
        if let Some(tied) = base.iter().find(|p| p.aliases.iter().any(|alias| is_alias(alias, &target))) {
            return Err(LoraError::Tied { target, name: tied.name.clone() });
        }
        let names = linear_names(base);
        let known = names.join(", ");
        if let Some(other) = base.iter().find(|parameter| matches(parameter.module(), &target)) {
            return Err(LoraError::NotLinear { target, module: other.module().to_owned(), known });
        }
        let near = nearest(&target, names.iter().copied()).map(str::to_owned);
        return Err(LoraError::NotFound { target, known, near });
    }
    Ok(())
}

fn is_alias(alias: &str, target: &str) -> bool {
    alias.strip_suffix(".weight").is_some_and(|module| matches(module, target))
}

/// The last parts of the names of all linear modules, each once, in order.
fn linear_names(base: &ParameterTable) -> Vec<&str> {
    let mut names = Vec::new();
    for parameter in base.iter().filter(|parameter| parameter.kind.is_linear()) {
        let module = parameter.module();
        let name = module.rsplit_once('.').map_or(module, |(_, name)| name);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}
