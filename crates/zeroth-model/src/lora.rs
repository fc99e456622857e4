//! LoRA: the small trainable matrices beside the linear maps of a frozen model, as peft places and names them.

use fancy_regex::Regex;

use crate::error::did_you_mean;
use crate::table::{
    AdaptedParameter, AdapterScales, Parameter, ParameterKind, ParameterRole, ParameterTable, ParameterUnit,
    StoredPart, module_of,
};
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
        self.scale_of_rank(self.rank)
    }

    /// The factor of the product of an adapter that has this rank because it is one for several maps: its alpha grows with
    /// its rank, as in PEFT.
    pub fn scale_of_rank(&self, rank: u64) -> f64 {
        let alpha = self.alpha * (rank as f64 / self.rank as f64);
        alpha / if self.rslora { (rank as f64).sqrt() } else { rank as f64 }
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
    /// Every linear map except the output projection; experts and routers included. Where a model has experts, its dense
    /// feed-forward parts are not, as PEFT resolves it: their names stand for those of the experts.
    AllLinear,
    /// Those whose module has one of these names, or ends in one (`q_proj`, `self_attn.q_proj`). Experts are named by their
    /// projections (`gate_proj` and `up_proj`, `down_proj`), as on disk, or as transformers 5 has them (`gate_up_proj`).
    Named(Vec<String>),
    /// Those whose whole module name matches this regular expression.
    Pattern(String),
}

/// Adapters that cannot be added.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "each message names its fields")]
pub enum LoraError {
    #[error("a LoRA rank of 0 adds nothing: give 1 or more, 8 is usual")]
    Rank,
    #[error("a LoRA rank of {rank} is larger than {module} ({out} × {input}): give at most {}", out.max(input))]
    RankTooLarge { rank: u64, module: String, out: u64, input: u64 },
    #[error("a LoRA alpha of {0} gives no scale: give a finite number above 0, 32 is usual")]
    Alpha(f64),
    #[error("a LoRA dropout of {0} is no probability: give 0 or more and below 1, 0.05 is usual")]
    Dropout(f64),
    #[error("the LoRA target `{pattern}` is no regular expression: {why}")]
    Pattern { pattern: String, why: String },
    #[error("LoRA on the output projection ({module}) is not yet built: leave it out of the target modules")]
    Head { module: String },
    #[error("no LoRA target modules are given: name some, or say all-linear")]
    NoTargets,
    #[error(
        "the LoRA target `{given}` of experts is one matrix with {missing}: name {missing} too, or leave `{given}` out"
    )]
    Fused { given: String, missing: String },
    #[error(
        "the LoRA targets are dense feed-forward parts only, which get no adapter in a model with experts, as in PEFT: add \
         others ({known})"
    )]
    DenseOnly { known: String },
    #[error(
        "a LoRA dropout of {0} is not possible on experts and routers, whose adapters add to the weights themselves: give 0, \
         or leave them out of the target modules"
    )]
    ExpertDropout(f64),
    #[error("the LoRA target `{target}` matches no module of this model{}{}", around(" (", known, ")"), did_you_mean(near.as_deref()))]
    NotFound {
        target: String,
        /// The names that linear modules have; empty where another error has them.
        known: String,
        near: Option<String>,
    },
    #[error("the LoRA target `{target}` is not a linear map ({module}){}", around("; those are ", known, ""))]
    NotLinear {
        target: String,
        module: String,
        /// The names that linear modules have; empty where another error has them.
        known: String,
    },
    #[error("the LoRA target `{target}` is tied to {name}: this model has no matrix of its own there")]
    Tied { target: String, name: String },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Several(Vec<LoraError>),
}

/// What could be named instead, between two texts; nothing without it.
fn around(before: &str, known: &str, after: &str) -> String {
    if known.is_empty() { String::new() } else { format!("{before}{known}{after}") }
}

/// The table of the adapters: for each targeted linear map `lora_A` [rank, in] and `lora_B` [out, rank], in the units of
/// the maps. Units without adapters are left out.
///
/// Those of experts are `lora_A` [experts, rank, in] and `lora_B` [experts, out, rank]; the adapter of gate and up, which
/// are one parameter, has twice the rank. They are named after the parameter; their parts have the names and shapes that
/// peft saves them by, which for `lora_B` is [out, rank · experts].
pub fn lora_table(base: &ParameterTable, lora: &Lora) -> Result<ParameterTable, LoraError> {
    let targets = Targets::find(base, lora)?;
    let units = base.units.iter().map(|unit| ParameterUnit {
        name: unit.name,
        parameters: unit
            .parameters
            .iter()
            .filter(|parameter| targets.contain(parameter))
            .flat_map(|parameter| targets.adapter(parameter, unit))
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
    if lora.dropout > 0.0 && base.iter().any(|p| adds_to_weights(p) && targets.contain(p)) {
        return Err(LoraError::ExpertDropout(lora.dropout));
    }
    let adapted = |unit: &ParameterUnit| {
        let parameters = unit.parameters.iter().flat_map(|parameter| {
            let own = targets.contain(parameter).then(|| targets.adapter(parameter, unit));
            std::iter::once(Parameter { trained: false, ..parameter.clone() })
                .chain(own.into_iter().flatten())
        });
        ParameterUnit { name: unit.name, parameters: parameters.collect() }
    };
    let units = base.units.iter().map(adapted);
    let adapters = Some(AdapterScales {
        scale: lora.scale(),
        fused_scale: lora.scale_of_rank(2 * lora.rank),
        dropout: lora.dropout,
    });
    Ok(ParameterTable { units: units.collect(), routing: base.routing, adapters })
}

/// The name of a matrix of a module's adapter, `part` being `lora_A` or `lora_B`.
fn adapter_name(module: &str, part: &str) -> String {
    format!("base_model.model.{module}.{part}.weight")
}

/// What the inner matrix of this name adapts, by its name; `None` for other names.
pub fn adapted_module(inner: &str) -> Option<&str> {
    inner.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")
}

/// Whether any targeted map is of an expert or a router: their adapters have no dropout.
pub fn adapts_experts(base: &ParameterTable, lora: &Lora) -> Result<bool, LoraError> {
    let targets = Targets::find(base, lora)?;
    Ok(base.iter().any(|parameter| adds_to_weights(parameter) && targets.contain(parameter)))
}

/// Whether PEFT adds the product of its adapter to the weights, instead of applying it to the input.
pub(crate) fn adds_to_weights(parameter: &Parameter) -> bool {
    matches!(parameter.kind, ParameterKind::Expert | ParameterKind::Router)
}

/// The name that a linear map's adapter is called by: its module's, or that of all experts' parameter.
pub(crate) fn adapted_name(linear: &Parameter) -> &str {
    if linear.kind == ParameterKind::Expert { &linear.name } else { linear.module() }
}

/// [out, in] of a linear map, of each expert.
fn sides(linear: &Parameter) -> [u64; 2] {
    linear.shape.last_chunk().copied().expect("tables give linear maps two sides")
}

/// The projections of an expert that are one parameter, by their last names on disk: gate and up, or down.
fn projections(experts: &Parameter) -> Vec<&str> {
    let each = experts.parts.len() / experts.shape[0].max(1) as usize;
    experts.parts[..each].iter().map(|part| last(module_of(&part.name))).collect()
}

/// The last part of a module's name.
pub(crate) fn last(module: &str) -> &str {
    module.rsplit_once('.').map_or(module, |(_, last)| last)
}

/// The targets of a request that was checked against a model.
pub(crate) struct Targets<'a> {
    choice: Choice<'a>,
    rank: u64,
    /// Whether the model has experts.
    has_experts: bool,
}

enum Choice<'a> {
    AllLinear,
    Named(&'a [String]),
    Pattern(Regex),
}

impl Choice<'_> {
    /// Whether a module of this name is meant.
    fn means(&self, module: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Named(names) => names.iter().any(|name| matches(module, name)),
            // A search that runs too long was refused when the expression was checked.
            Self::Pattern(pattern) => pattern.is_match(module).unwrap_or(false),
        }
    }

    /// Whether a projection of experts is meant, by its name without an expert's number or by that of any expert.
    fn means_projection(&self, experts: &Parameter, projection: &str) -> bool {
        let of_experts = format!("{}.{projection}", experts.module());
        self.means(&of_experts)
            || experts
                .parts
                .iter()
                .map(|part| module_of(&part.name))
                .any(|module| last(module) == projection && self.means(module))
    }
}

impl<'a> Targets<'a> {
    pub(crate) fn find(base: &ParameterTable, lora: &'a Lora) -> Result<Self, LoraError> {
        if lora.rank == 0 {
            return Err(LoraError::Rank);
        }
        let choice = match &lora.targets {
            LoraTargets::AllLinear => Choice::AllLinear,
            LoraTargets::Named(names) => {
                check_targets(base, names)?;
                Choice::Named(names)
            }
            LoraTargets::Pattern(pattern) => {
                let not_one = |error: fancy_regex::Error| not_a_pattern(pattern, &error);
                // By itself first: places in a message are its own.
                Regex::new(pattern).map_err(not_one)?;
                // The whole name must match, as by Python's `re.fullmatch`.
                let whole = Regex::new(&format!("^(?:{pattern})$")).map_err(not_one)?;
                check_pattern(base, pattern, &whole)?;
                Choice::Pattern(whole)
            }
        };
        let has_experts = base.iter().any(|parameter| parameter.kind == ParameterKind::Expert);
        let targets = Self { choice, rank: lora.rank, has_experts };
        if !lora.scale().is_finite() || lora.alpha <= 0.0 {
            return Err(LoraError::Alpha(lora.alpha));
        }
        if !(0.0..1.0).contains(&lora.dropout) {
            return Err(LoraError::Dropout(lora.dropout));
        }
        for experts in base.iter().filter(|parameter| parameter.kind == ParameterKind::Expert) {
            targets.refuse_half(experts)?;
        }
        if has_experts && !base.iter().any(|parameter| targets.contain(parameter)) {
            return Err(LoraError::DenseOnly { known: linear_names(base).join(", ") });
        }
        for linear in base.iter().filter(|parameter| targets.contain(parameter)) {
            let ([out, input], rank) = (sides(linear), targets.rank_of(linear));
            if rank > out.max(input) {
                let module = adapted_name(linear).to_owned();
                return Err(LoraError::RankTooLarge { rank, module, out, input });
            }
        }
        Ok(targets)
    }

    pub(crate) fn contain(&self, parameter: &Parameter) -> bool {
        match parameter.kind {
            ParameterKind::Expert => {
                self.choice.means(&parameter.name)
                    || projections(parameter).iter().all(|name| self.choice.means_projection(parameter, name))
            }
            ParameterKind::Router => {
                let stored = parameter.parts.iter().map(|part| module_of(&part.name));
                // PEFT's own name for it is that of the parameter, `gate.weight`.
                let mut names = [parameter.module(), &parameter.name].into_iter().chain(stored);
                names.any(|name| self.choice.means(name))
            }
            ParameterKind::Linear => {
                let is_feed_forward = matches!(
                    parameter.role,
                    Some(ParameterRole::FeedForwardInput | ParameterRole::FeedForwardOutput)
                );
                let is_dense = self.has_experts && is_feed_forward;
                !is_dense && self.choice.means(parameter.module())
            }
            ParameterKind::Head => {
                !matches!(self.choice, Choice::AllLinear) && self.choice.means(parameter.module())
            }
            _ => false,
        }
    }

    /// Refuses targets that name one of two projections that are one parameter.
    fn refuse_half(&self, experts: &Parameter) -> Result<(), LoraError> {
        if self.contain(experts) {
            return Ok(());
        }
        let (given, missing): (Vec<&str>, Vec<&str>) =
            projections(experts).into_iter().partition(|name| self.choice.means_projection(experts, name));
        match (given.first(), missing.first()) {
            (Some(given), Some(missing)) => {
                let [given, missing] = [*given, *missing].map(str::to_owned);
                Err(LoraError::Fused { given, missing })
            }
            _ => Ok(()),
        }
    }

    /// The rank of a map's adapter: that of an expert's gate and up, which are one, is the sum of both.
    fn rank_of(&self, linear: &Parameter) -> u64 {
        match linear.kind {
            ParameterKind::Expert => self.rank * projections(linear).len() as u64,
            _ => self.rank,
        }
    }

    /// The two matrices of a map's adapter. `unit` is the map's.
    fn adapter(&self, linear: &Parameter, unit: &ParameterUnit) -> [Parameter; 2] {
        let ([out, input], rank) = (sides(linear), self.rank_of(linear));
        let matrix = |part: &str, kind, shape: Vec<u64>| Parameter {
            role: linear.role,
            adapts: Some(AdaptedParameter { name: linear.name.clone(), kind: linear.kind }),
            ..Parameter::new(adapter_name(adapted_name(linear), part), shape, kind)
        };
        if linear.kind != ParameterKind::Expert {
            return [
                matrix("lora_A", ParameterKind::LoraA, vec![rank, input]),
                matrix("lora_B", ParameterKind::LoraB, vec![out, rank]),
            ];
        }
        // PEFT wraps the module of all experts once for each adapted parameter: the first, gate_up, is inside.
        let later = unit.parameters.iter().skip_while(|parameter| *parameter != linear).skip(1);
        let is_inside = later.filter(|p| p.kind == ParameterKind::Expert).any(|p| self.contain(p));
        let module = format!("{}{}", linear.module(), if is_inside { ".base_layer" } else { "" });
        let experts = linear.shape[0];
        let matrix = |part: &str, kind, shape: [u64; 3], stored: [u64; 2]| Parameter {
            parts: vec![StoredPart::whole(adapter_name(&module, part), stored.to_vec())],
            ..matrix(part, kind, shape.to_vec())
        };
        [
            matrix("lora_A", ParameterKind::LoraA, [experts, rank, input], [experts * rank, input]),
            matrix("lora_B", ParameterKind::LoraB, [experts, out, rank], [out, rank * experts]),
        ]
    }
}

/// The names that a target may be compared with.
fn target_names(parameter: &Parameter) -> Vec<&str> {
    let mut names = vec![parameter.module()];
    if adds_to_weights(parameter) {
        names = vec![parameter.name.as_str()];
        names.extend((parameter.kind == ParameterKind::Router).then(|| parameter.module()));
    }
    names.extend(parameter.parts.iter().map(|part| module_of(&part.name)));
    names
}

fn not_a_pattern(pattern: &str, error: &fancy_regex::Error) -> LoraError {
    LoraError::Pattern { pattern: pattern.to_owned(), why: error.to_string().trim().to_owned() }
}

/// An expression must match a linear map, and nothing else that has parameters.
fn check_pattern(base: &ParameterTable, target: &str, pattern: &Regex) -> Result<(), LoraError> {
    let mut matched = Vec::new();
    for parameter in base.iter() {
        let mut names: Vec<String> = target_names(parameter).into_iter().map(str::to_owned).collect();
        if parameter.kind == ParameterKind::Expert {
            names.extend(projections(parameter).iter().map(|name| format!("{}.{name}", parameter.module())));
        }
        for name in names {
            if pattern.is_match(&name).map_err(|error| not_a_pattern(target, &error))? {
                matched.push(parameter);
            }
        }
    }
    let (target, known) = (target.to_owned(), linear_names(base).join(", "));
    // The bias of a linear map is in the same module.
    let is_other = |p: &&&Parameter| !p.kind.is_linear() && p.kind != ParameterKind::Bias;
    if let Some(other) = matched.iter().find(is_other) {
        return Err(LoraError::NotLinear { target, module: other.module().to_owned(), known });
    }
    if matched.is_empty() {
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
    let mut wrong: Vec<LoraError> =
        targets.iter().filter_map(|target| check_target(base, target).err()).collect();
    // What could be named instead is said once, by the last.
    let last = wrong.len().saturating_sub(1);
    for error in &mut wrong[..last] {
        if let LoraError::NotFound { known, .. } | LoraError::NotLinear { known, .. } = error {
            known.clear();
        }
    }
    match wrong.len() {
        0 => Ok(()),
        1 => Err(wrong.remove(0)),
        _ => Err(LoraError::Several(wrong)),
    }
}

fn check_target(base: &ParameterTable, target: &str) -> Result<(), LoraError> {
    let names_it = |parameter: &Parameter| {
        let of_experts = |name: &&str| matches(&format!("{}.{name}", parameter.module()), target);
        target_names(parameter).iter().any(|name| matches(name, target))
            || (parameter.kind == ParameterKind::Expert && projections(parameter).iter().any(of_experts))
    };
    if base.iter().any(|parameter| parameter.kind.is_linear() && names_it(parameter)) {
        return Ok(());
    }
    if let Some(tied) = base.iter().find(|p| p.aliases.iter().any(|alias| is_alias(alias, target))) {
        return Err(LoraError::Tied { target: target.to_owned(), name: tied.name.clone() });
    }
    let names = linear_names(base);
    let (target, known) = (target.to_owned(), names.join(", "));
    if let Some(other) = base.iter().find(|parameter| matches(parameter.module(), &target)) {
        return Err(LoraError::NotLinear { target, module: other.module().to_owned(), known });
    }
    let near = nearest(&target, names.iter().copied()).map(str::to_owned);
    Err(LoraError::NotFound { target, known, near })
}

fn is_alias(alias: &str, target: &str) -> bool {
    alias.strip_suffix(".weight").is_some_and(|module| matches(module, target))
}

/// The last parts of the names of all linear modules, each once, in order.
fn linear_names(base: &ParameterTable) -> Vec<&str> {
    let mut names = Vec::new();
    for parameter in base.iter().filter(|parameter| parameter.kind.is_linear()) {
        let own = match parameter.kind {
            ParameterKind::Expert => projections(parameter),
            _ => vec![last(parameter.module())],
        };
        for name in own {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    names
}
