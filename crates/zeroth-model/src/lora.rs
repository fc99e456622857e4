//! LoRA: the small trainable matrices beside the linear maps of a frozen model, as peft places and names them.

use regex::Regex;

use crate::error::did_you_mean;
use crate::table::{Adapters, Parameter, ParameterKind, ParameterTable, Unit};
use zeroth_base::nearest;

/// Which adapters to add.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Inner width of an adapter.
    pub rank: u64,
    /// The numerator of [`Self::scale`].
    pub alpha: f64,
    /// Whether alpha is divided by the root of the rank (rank-stabilised LoRA) instead of the rank.
    pub rslora: bool,
    /// The probability that an element of an adapter's input is zeroed in training.
    pub dropout: f64,
    /// The linear maps that get one.
    pub targets: LoraTargets,
}

impl Default for Lora {
    fn default() -> Self {
        Self { rank: 8, alpha: 32.0, rslora: false, dropout: 0.05, targets: LoraTargets::AllLinear }
    }
}

impl Lora {
    /// The factor of an adapter's product.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

/// How the inner matrices of new adapters are drawn; outer ones start at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoraInit {
    /// Uniform up to 1/√in: PEFT's `true`.
    #[default]
    Kaiming,
    /// Normal with standard deviation 1/rank: PEFT's `gaussian`.
    Gaussian,
}

/// The linear maps that get an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTargets {
    /// Every linear map except the output projection; experts and routers included.
    AllLinear,
    /// Those whose module has one of these names, or ends in one (`q_proj`, `self_attn.q_proj`).
    Named(Vec<String>),
    /// Those whose whole module name matches this regular expression.
    Pattern(String),
}

/// Adapters that cannot be added.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LoraError {
    /// A rank of zero.
    #[error("a LoRA rank of 0 adds nothing: give 1 or more, 8 is usual")]
    Rank,
    /// A rank beyond a matrix that it is to adapt.
    #[error("a LoRA rank of {rank} is larger than {module} ({out} × {input}): give at most {}", out.max(input))]
    RankTooLarge {
        /// The rank asked for.
        rank: u64,
        /// The linear map.
        module: String,
        /// Its outputs.
        out: u64,
        /// Its inputs.
        input: u64,
    },
    /// An alpha that gives no scale.
    #[error("a LoRA alpha of {0} gives no scale: give a finite number above 0, 32 is usual")]
    Alpha(f64),
    /// A dropout that is no probability.
    #[error("a LoRA dropout of {0} is no probability: give 0 or more and below 1, 0.05 is usual")]
    Dropout(f64),
    /// Not a regular expression.
    #[error("the LoRA target `{pattern}` is no regular expression: {why}")]
    Pattern {
        /// The expression.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
    /// An adapter on the output projection.
    #[error("LoRA on the output projection ({module}) is not yet built: leave it out of the target modules")]
    Head {
        /// Its module.
        module: String,
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
    let targets = Targets::find(base, lora)?;
    let units = base.units.iter().map(|unit| Unit {
        name: unit.name,
        parameters: unit
            .parameters
            .iter()
            .filter(|parameter| targets.contain(parameter))
            .flat_map(|parameter| adapter(parameter, lora.rank))
            .collect(),
    });
    let units = units.filter(|unit| !unit.parameters.is_empty()).collect();
    Ok(ParameterTable { units, routing: None, adapters: None })
}

/// A model with adapters: `base` frozen, and behind every targeted linear map its two matrices as in [`lora_table`],
/// trained.
pub fn add_adapters(base: &ParameterTable, lora: &Lora) -> Result<ParameterTable, LoraError> {
    let targets = Targets::find(base, lora)?;
    if let Some(head) = base.iter().find(|p| p.kind == ParameterKind::Head && targets.contain(p)) {
        return Err(LoraError::Head { module: head.module().to_owned() });
    }
    let adapted = |parameter: &Parameter| {
        let own = targets.contain(parameter).then(|| adapter(parameter, lora.rank));
        std::iter::once(Parameter { trained: false, ..parameter.clone() }).chain(own.into_iter().flatten())
    };
    let units = base
        .units
        .iter()
        .map(|unit| Unit { name: unit.name, parameters: unit.parameters.iter().flat_map(adapted).collect() });
    let adapters = Some(Adapters { scale: lora.scale(), dropout: lora.dropout });
    Ok(ParameterTable { units: units.collect(), routing: base.routing, adapters })
}

/// The name of a matrix of a module's adapter, `part` being `lora_A` or `lora_B`.
pub(crate) fn adapter_name(module: &str, part: &str) -> String {
    format!("base_model.model.{module}.{part}.weight")
}

fn adapter(linear: &Parameter, rank: u64) -> [Parameter; 2] {
    let [out, input] = sides(linear);
    let name = |part: &str| adapter_name(linear.module(), part);
    [
        Parameter::new(name("lora_A"), vec![rank, input], ParameterKind::LoraA),
        Parameter::new(name("lora_B"), vec![out, rank], ParameterKind::LoraB),
    ]
}

/// [out, in] of a linear map.
fn sides(linear: &Parameter) -> [u64; 2] {
    linear.shape.as_slice().try_into().expect("tables give linear maps two sides")
}

/// The targets of a request that was checked against a model.
enum Targets<'a> {
    AllLinear,
    Named(&'a [String]),
    Pattern(Regex),
}

impl<'a> Targets<'a> {
    fn find(base: &ParameterTable, lora: &'a Lora) -> Result<Self, LoraError> {
        if lora.rank == 0 {
            return Err(LoraError::Rank);
        }
        let targets = match &lora.targets {
            LoraTargets::AllLinear => Self::AllLinear,
            LoraTargets::Named(names) => {
                check_targets(base, names)?;
                Self::Named(names)
            }
            LoraTargets::Pattern(pattern) => {
                // The whole name must match, as by Python's `re.fullmatch`.
                let whole = Regex::new(&format!("^(?:{pattern})$")).map_err(|error| LoraError::Pattern {
                    pattern: pattern.clone(),
                    why: error.to_string().trim().to_owned(),
                })?;
                check_pattern(base, pattern, &whole)?;
                Self::Pattern(whole)
            }
        };
        if !lora.scale().is_finite() || lora.alpha <= 0.0 {
            return Err(LoraError::Alpha(lora.alpha));
        }
        if !(0.0..1.0).contains(&lora.dropout) {
            return Err(LoraError::Dropout(lora.dropout));
        }
        for linear in base.iter().filter(|parameter| targets.contain(parameter)) {
            let [out, input] = sides(linear);
            if lora.rank > out.max(input) {
                let module = linear.module().to_owned();
                return Err(LoraError::RankTooLarge { rank: lora.rank, module, out, input });
            }
        }
        Ok(targets)
    }

    fn contain(&self, parameter: &Parameter) -> bool {
        parameter.kind.is_linear()
            && match self {
                Self::AllLinear => parameter.kind != ParameterKind::Head,
                Self::Named(names) => names.iter().any(|name| matches(parameter.module(), name)),
                Self::Pattern(pattern) => pattern.is_match(parameter.module()),
            }
    }
}

/// An expression must match a linear map, and nothing else that has parameters.
fn check_pattern(base: &ParameterTable, target: &str, pattern: &Regex) -> Result<(), LoraError> {
    let (target, known) = (target.to_owned(), linear_names(base).join(", "));
    let matched = || base.iter().filter(|parameter| pattern.is_match(parameter.module()));
    // The bias of a linear map is in the same module.
    let is_other = |p: &&Parameter| !p.kind.is_linear() && p.kind != ParameterKind::Bias;
    if let Some(other) = matched().find(is_other) {
        return Err(LoraError::NotLinear { target, module: other.module().to_owned(), known });
    }
    if matched().next().is_none() {
        return Err(LoraError::NotFound { target, known, near: None });
    }
    Ok(())
}

/// Whether a module is called `target`, or ends in it at a dot.
fn matches(module: &str, target: &str) -> bool {
    module.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
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
