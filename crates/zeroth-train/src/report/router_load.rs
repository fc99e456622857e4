//! The load of a run's routers: the tokens of every expert in a step, over all ranks and micro-batches, as the step's record has
//! them. A token counts once for every expert that it is sent to.

use zeroth_program::{Compiled, RouterCounts};

/// How evenly the routers of a step spread tokens over experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterLoad {
    /// The largest share that an expert has of the tokens of its layer; an even load is 1 / experts.
    pub busiest: f64,
    /// The smallest.
    pub idlest: f64,
    /// The entropy of a layer's load divided by that of an even load, from 0 to 1; the mean over layers.
    pub entropy: f64,
}

impl RouterLoad {
    /// The load of a step; `None` where nothing was routed.
    pub(crate) fn of(routers: &[RouterCounts], counts: &[u32]) -> Option<Self> {
        let layers: Vec<Vec<f64>> = routers.iter().filter_map(|router| shares(router.rows(counts))).collect();
        if layers.is_empty() {
            return None;
        }
        let all = || layers.iter().flatten().copied();
        Some(Self {
            busiest: all().fold(0.0, f64::max),
            idlest: all().fold(1.0, f64::min),
            entropy: layers.iter().map(|shares| entropy(shares)).sum::<f64>() / layers.len() as f64,
        })
    }
}

/// The experts' shares of a layer's tokens; `None` without tokens.
fn shares(rows: &[u32]) -> Option<Vec<f64>> {
    let total: f64 = rows.iter().map(|rows| f64::from(*rows)).sum();
    (total > 0.0).then(|| rows.iter().map(|rows| f64::from(*rows) / total).collect())
}

/// The entropy of shares, divided by that of even ones.
fn entropy(shares: &[f64]) -> f64 {
    if shares.len() < 2 {
        return 1.0;
    }
    let sum: f64 = shares.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
    sum / (shares.len() as f64).ln()
}

/// A layer has collapsed where the entropy of its load is below this part of the way from its least, all tokens on the same
/// experts, to an even load: with 8 of 128 experts as if 18 of them had all tokens.
const LOW_SPREAD: f64 = 0.3;
/// Steps in a row with a low spread after which a layer is reported.
const LOW_STEPS: u32 = 10;
/// An expert without a token in this number of steps in a row is dead,
const DEAD_STEPS: u32 = 50;
/// where an even load would have given it this many: few tokens leave experts out by chance.
const DEAD_EXPECTED: f64 = 100.0;

/// Where the entropy of a layer's load is between the least that `per_token` experts of a token allow, 0, and an even one's, 1.
fn spread(entropy: f64, experts: usize, per_token: usize) -> f64 {
    let least = (per_token as f64).ln() / (experts as f64).ln();
    if least < 1.0 { (entropy - least) / (1.0 - least) } else { 1.0 }
}

/// Watches the routers of a run for collapse. Every layer is reported once.
#[derive(Debug)]
pub(crate) struct RouterWatch {
    layers: Vec<WatchedLayer>,
}

#[derive(Debug)]
struct WatchedLayer {
    router: RouterCounts,
    name: String,
    /// Steps in a row with a low spread.
    low: u32,
    /// For each expert, steps in a row without a token, and the tokens that an even load would have given it in them.
    idle: Vec<(u32, f64)>,
    is_reported: bool,
    is_reported_nonfinite: bool,
}

impl RouterWatch {
    pub(crate) fn new(compiled: &Compiled) -> Self {
        let layer = |router: &RouterCounts| WatchedLayer {
            router: *router,
            name: compiled.graph.units[router.unit.index()].name.clone(),
            low: 0,
            idle: vec![(0, 0.0); router.experts],
            is_reported: false,
            is_reported_nonfinite: false,
        };
        Self { layers: compiled.program.routers.iter().map(layer).collect() }
    }

    /// The first router of a step whose weights are infinite or NaN: the name of its unit.
    pub(crate) fn nonfinite(&self, counts: &[u32]) -> Option<&str> {
        let mut layers = self.layers.iter();
        layers.find(|layer| layer.router.nonfinite(counts) > 0).map(|layer| layer.name.as_str())
    }

    /// Takes a step into account and returns messages about it.
    pub(crate) fn observe(&mut self, step: u64, counts: &[u32]) -> Vec<String> {
        let mut notes = Vec::new();
        // Later layers are not finite because an earlier one is not.
        let lost = self.layers.iter_mut().find(|layer| layer.router.nonfinite(counts) > 0);
        if let Some(layer) = lost {
            if !std::mem::replace(&mut layer.is_reported_nonfinite, true) {
                let name = &layer.name;
                notes.push(format!(
                    "step {step} is skipped: the router of {name} gives weights that are not finite"
                ));
            }
            return notes;
        }
        notes.extend(self.layers.iter_mut().filter_map(|layer| layer.observe(step, counts)));
        notes
    }
}

impl WatchedLayer {
    fn observe(&mut self, step: u64, counts: &[u32]) -> Option<String> {
        let rows = self.router.rows(counts);
        let shares = shares(rows)?;
        let entropy = entropy(&shares);
        let RouterCounts { experts, per_token, .. } = self.router;
        self.low = if spread(entropy, experts, per_token) < LOW_SPREAD { self.low + 1 } else { 0 };
        let even = rows.iter().map(|rows| f64::from(*rows)).sum::<f64>() / rows.len() as f64;
        for ((steps, expected), rows) in self.idle.iter_mut().zip(rows) {
            (*steps, *expected) = if *rows == 0 { (*steps + 1, *expected + even) } else { (0, 0.0) };
        }
        let is_dead = |(steps, expected): &&(u32, f64)| *steps >= DEAD_STEPS && *expected >= DEAD_EXPECTED;
        let dead = self.idle.iter().filter(is_dead).count();
        let what = if self.low >= LOW_STEPS {
            format!("the entropy of its load is {entropy:.2} of an even one's for {LOW_STEPS} steps")
        } else if dead > 0 {
            format!("{dead} of its {experts} experts had no token for {DEAD_STEPS} steps")
        } else {
            return None;
        };
        if std::mem::replace(&mut self.is_reported, true) {
            return None;
        }
        let name = &self.name;
        Some(format!(
            "the experts of {name} collapse (step {step}): {what}; a lower learning rate or an auxiliary loss \
             (router_aux_loss_coef with output_router_logits in config.json) spreads tokens"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeroth_graph::UnitId;

    fn router(first: usize) -> RouterCounts {
        RouterCounts { node: first, unit: UnitId::at(0), experts: 4, per_token: 1, first }
    }

    fn watch() -> RouterWatch {
        let layer = |(name, first): (&str, usize)| WatchedLayer {
            router: router(first),
            name: name.to_owned(),
            low: 0,
            idle: vec![(0, 0.0); 4],
            is_reported: false,
            is_reported_nonfinite: false,
        };
        RouterWatch { layers: [("block 0", 0), ("block 1", 5)].map(layer).into() }
    }

    #[test]
    fn shares_and_entropy_are_over_all_layers() {
        let routers = [router(0), router(5)];
        let found = RouterLoad::of(&routers, &[2, 2, 2, 2, 0, 8, 0, 0, 0, 0]).unwrap();
        assert_eq!(found, RouterLoad { busiest: 1.0, idlest: 0.0, entropy: 0.5 });
        let found = RouterLoad::of(&routers[..1], &[6, 2, 0, 0, 3]).unwrap();
        let half = -(0.75 * 0.75f64.ln() + 0.25 * 0.25f64.ln()) / 4f64.ln();
        assert_eq!((found.busiest, found.idlest), (0.75, 0.0));
        assert!((found.entropy - half).abs() < 1e-12, "{found:?}");
        // A layer without tokens says nothing; a model without experts has no load.
        assert_eq!(RouterLoad::of(&routers, &[2, 2, 2, 2, 0, 0, 0, 0, 0, 0]).unwrap().entropy, 1.0);
        assert_eq!(RouterLoad::of(&routers, &[0; 10]), None);
        assert_eq!(RouterLoad::of(&[], &[]), None);
    }

    #[test]
    fn spread_is_0_where_all_tokens_have_the_same_experts() {
        let load = |experts: usize, used: usize| {
            let shares: Vec<f64> =
                (0..experts).map(|at| if at < used { 1.0 / used as f64 } else { 0.0 }).collect();
            entropy(&shares)
        };
        for (experts, per_token) in [(8, 1), (8, 2), (128, 8)] {
            let of = |used| spread(load(experts, used), experts, per_token);
            assert!(
                of(per_token).abs() < 1e-12 && (of(experts) - 1.0).abs() < 1e-12,
                "{experts} {per_token}"
            );
        }
        assert!(spread(load(128, 18), 128, 8) < LOW_SPREAD && spread(load(128, 19), 128, 8) > LOW_SPREAD);
        // Where every token has every expert, or there is one, nothing can collapse.
        assert_eq!((spread(load(4, 4), 4, 4), spread(1.0, 1, 1)), (1.0, 1.0));
    }

    #[test]
    fn a_collapsed_layer_is_reported_once() {
        let mut watch = watch();
        let counts = [9, 9, 9, 9, 0, 36, 0, 0, 0, 0];
        let notes: Vec<String> = (1..=30).flat_map(|step| watch.observe(step, &counts)).collect();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].starts_with("the experts of block 1 collapse (step 10)"), "{}", notes[0]);
        // One even step between them begins anew.
        let mut watch = self::watch();
        let even = [9, 9, 9, 9, 0, 9, 9, 9, 9, 0];
        let notes =
            (1..=30).flat_map(|step| watch.observe(step, if step % 10 == 0 { &even } else { &counts }));
        assert_eq!(notes.count(), 0);
    }

    #[test]
    fn a_dead_expert_is_reported_where_chance_does_not_explain_it() {
        let of = |rows: u32, steps: u64| {
            let mut watch = watch();
            let counts: Vec<u32> = (0..10).map(|at| if at % 5 < 3 { rows } else { 0 }).collect();
            (1..=steps).flat_map(|step| watch.observe(step, &counts)).collect::<Vec<_>>()
        };
        assert!(of(3, 49).is_empty());
        let notes = of(3, 60);
        assert_eq!(notes.len(), 2, "{notes:?}");
        assert!(notes[0].contains("block 0 collapse (step 50): 1 of its 4 experts"), "{}", notes[0]);
        // A token per expert in four steps is too few to tell.
        assert!(of(0, 60).is_empty());
        let mut watch = watch();
        let few = [1, 1, 0, 0, 0, 1, 1, 1, 1, 0];
        assert_eq!((1..=60).flat_map(|step| watch.observe(step, &few)).count(), 0);
    }

    #[test]
    fn a_router_that_is_not_finite_is_named_once() {
        let mut watch = watch();
        let counts = [9, 9, 9, 9, 0, 36, 0, 0, 0, 7];
        assert_eq!(watch.nonfinite(&counts), Some("block 1"));
        let notes: Vec<String> = (1..=3).flat_map(|step| watch.observe(step, &counts)).collect();
        assert_eq!(notes, ["step 1 is skipped: the router of block 1 gives weights that are not finite"]);
    }
}
