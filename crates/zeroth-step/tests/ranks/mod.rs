//! Ranks in one process: runs a program on the reference machine, in f64, one instruction after the other on all ranks.
//!
//! What is released is poisoned, so a program that reads what is not there computes NaN.

use zeroth_graph::reference::{Data, Machine};
use zeroth_graph::{Backward, Graph, ParamId};
use zeroth_step::Layout;
use zeroth_step::program::{Action, Addition, Program, SectionKind};

const BETAS: [f64; 2] = [0.9, 0.95];
const RATE: f64 = 1e-2;
const CLIP: f64 = 1.0;

/// A rank: its machine, and what it holds of every flat.
struct Rank<'a> {
    machine: Machine<'a>,
    weights: Vec<Vec<f64>>,
    gradients: Vec<Vec<f64>>,
    moments: Vec<Vec<[f64; 2]>>,
}

/// Ranks that run one program.
pub(crate) struct Ranks<'a> {
    graph: &'a Graph,
    backward: &'a Backward,
    program: &'a Program,
    members: Vec<Rank<'a>>,
    steps: i32,
    factor: f64,
    pub(crate) loss: f64,
    pub(crate) norm: f64,
}

fn layout_elements(layout: &Layout, flat: usize, params: &[Vec<f64>]) -> Vec<f64> {
    let flat = &layout.flats[flat];
    let mut elements = vec![0.0; flat.padded() as usize];
    for slot in &flat.slots {
        let start = slot.start as usize;
        elements[start..start + slot.elements as usize].copy_from_slice(&params[slot.param.index()]);
    }
    elements
}

impl<'a> Ranks<'a> {
    pub(crate) fn new(
        graph: &'a Graph,
        backward: &'a Backward,
        program: &'a Program,
        placeholder: &'a Data,
        params: &[Vec<f64>],
    ) -> Self {
        let layout = &program.layout;
        let flats = 0..layout.flats.len();
        let rank = |rank: u64| {
            let held = |flat: usize| {
                let whole = layout_elements(layout, flat, params);
                if !program.cuts_parameters {
                    return whole;
                }
                let shard = layout.flats[flat].shard(rank, layout.ranks);
                whole[shard.start as usize..shard.end as usize].to_vec()
            };
            let weights: Vec<Vec<f64>> = flats.clone().map(held).collect();
            let shard = |flat: usize| {
                let shard = layout.flats[flat].shard(rank, layout.ranks);
                vec![0.0; (shard.end - shard.start) as usize]
            };
            let moments = weights.iter().map(|weights| vec![[0.0; 2]; weights.len()]).collect();
            let mut machine = Machine::new(graph, placeholder, params.to_vec());
            if program.cuts_parameters {
                // What is not persistent is not there until it is gathered.
                for flat in layout.flats.iter().filter(|flat| flat.kind != zeroth_step::FlatKind::Persistent)
                {
                    flat.slots.iter().for_each(|slot| machine.param_mut(slot.param).fill(f64::NAN));
                }
            }
            Rank { machine, weights, gradients: flats.clone().map(shard).collect(), moments }
        };
        let members = (0..layout.ranks).map(rank).collect();
        Self { graph, backward, program, members, steps: 0, factor: 1.0, loss: 0.0, norm: 0.0 }
    }

    /// One step. `data` gives each rank its micro-batch; `trained` is the number of trained tokens of the whole step.
    pub(crate) fn step(&mut self, data: impl Fn(usize, usize) -> &'a Data, trained: f64) {
        (self.loss, self.steps) = (0.0, self.steps + 1);
        let mut micro = 0;
        for section in self.program.in_order() {
            if section.kind != SectionKind::Update {
                for (rank, at) in self.members.iter_mut().zip(0..) {
                    rank.machine.feed(data(micro, at));
                }
                micro += 1;
            }
            for instruction in &section.instructions {
                self.run(&instruction.action, trained);
            }
            if section.kind != SectionKind::Update {
                let loss = |rank: &Rank<'_>| rank.machine.value(self.backward.loss)[0] / trained;
                self.loss += self.members.iter().map(loss).sum::<f64>();
            }
        }
    }

    /// Every parameter's elements as the ranks hold them together.
    pub(crate) fn params(&self) -> Vec<Vec<f64>> {
        let mut params: Vec<Vec<f64>> =
            self.graph.params.iter().map(|param| vec![0.0; param.elements() as usize]).collect();
        for flat in 0..self.program.layout.flats.len() {
            let whole = self.whole(flat);
            for slot in &self.program.layout.flats[flat].slots {
                let start = slot.start as usize;
                params[slot.param.index()].copy_from_slice(&whole[start..start + slot.elements as usize]);
            }
        }
        params
    }

    /// A flat's weights as the ranks hold them together.
    fn whole(&self, flat: usize) -> Vec<f64> {
        let holders = if self.program.cuts_parameters { self.members.len() } else { 1 };
        self.members[..holders].iter().flat_map(|rank| rank.weights[flat].clone()).collect()
    }

    fn slots(&self, flat: usize) -> Vec<(ParamId, usize, usize)> {
        let slots = self.program.layout.flats[flat].slots.iter();
        slots.map(|slot| (slot.param, slot.start as usize, slot.elements as usize)).collect()
    }

    fn run(&mut self, action: &Action, trained: f64) {
        match action {
            Action::Forward(node) => self.members.iter_mut().for_each(|rank| rank.machine.run_forward(*node)),
            Action::Backward(node) => {
                self.members.iter_mut().for_each(|rank| rank.machine.run_backward(self.backward, *node));
            }
            Action::Gather(flat) => {
                let (whole, slots) = (self.whole(*flat), self.slots(*flat));
                for rank in &mut self.members {
                    for (param, start, elements) in &slots {
                        rank.machine.param_mut(*param).copy_from_slice(&whole[*start..start + elements]);
                    }
                }
            }
            Action::Release(flat) => {
                for (param, ..) in self.slots(*flat) {
                    self.members.iter_mut().for_each(|rank| rank.machine.param_mut(param).fill(f64::NAN));
                }
            }
            Action::Clear(flat) => {
                for (param, ..) in self.slots(*flat) {
                    self.members.iter_mut().for_each(|rank| rank.machine.gradient_mut(param).fill(0.0));
                }
            }
            Action::Reduce { flat, chunk, addition } => {
                self.reduce(*flat, chunk.start..chunk.end, *addition, trained);
            }
            Action::GatherGradient(flat) => {
                let whole: Vec<f64> =
                    self.members.iter().flat_map(|rank| rank.gradients[*flat].clone()).collect();
                self.members.iter_mut().for_each(|rank| rank.gradients[*flat].clone_from(&whole));
            }
            Action::Control => {
                let squares = |rank: &Rank<'_>| rank.gradients.iter().flatten().map(|g| g * g).sum::<f64>();
                let holders = if self.program.cuts_parameters { self.members.len() } else { 1 };
                self.norm = self.members[..holders].iter().map(squares).sum::<f64>().sqrt();
                self.factor = (CLIP / (self.norm + 1e-6)).min(1.0);
            }
            Action::Update(flat) => self.update(*flat),
        }
    }

    /// Adds the ranks' gradients in rank order and gives each rank its part of the chunk.
    fn reduce(&mut self, flat: usize, chunk: std::ops::Range<u64>, addition: Addition, trained: f64) {
        let params: Vec<Vec<f64>> = {
            let of = |rank: &Rank<'_>| {
                let mut all = vec![0.0; self.program.layout.flats[flat].padded() as usize];
                for (param, start, elements) in self.slots(flat) {
                    all[start..start + elements].copy_from_slice(rank.machine.gradient(param));
                }
                all
            };
            self.members.iter().map(of).collect()
        };
        let layout = &self.program.layout;
        for (rank, index) in self.members.iter_mut().zip(0..) {
            let shard = layout.flats[flat].shard(index, layout.ranks);
            // At stage 0 the last step made it whole.
            rank.gradients[flat].resize((shard.end - shard.start) as usize, 0.0);
            let held = (shard.end - shard.start).min(chunk.end);
            for element in chunk.start..held {
                let at = (shard.start + element) as usize;
                let sum = params.iter().map(|gradient| gradient[at]).sum::<f64>() / trained;
                let there = &mut rank.gradients[flat][element as usize];
                match addition {
                    Addition::Write => *there = sum,
                    Addition::Add => *there += sum,
                }
            }
        }
    }

    fn update(&mut self, flat: usize) {
        let (t, slots) = (self.steps, self.slots(flat));
        for rank in &mut self.members {
            for (element, weight) in rank.weights[flat].iter_mut().enumerate() {
                let g = rank.gradients[flat][element] * self.factor;
                let [m, v] = &mut rank.moments[flat][element];
                *m = BETAS[0] * *m + (1.0 - BETAS[0]) * g;
                *v = BETAS[1] * *v + (1.0 - BETAS[1]) * g * g;
                let root = (*v / (1.0 - BETAS[1].powi(t))).sqrt() + 1e-8;
                *weight -= RATE * (*m / (1.0 - BETAS[0].powi(t))) / root;
            }
            if !self.program.cuts_parameters {
                for (param, start, elements) in &slots {
                    let weights = rank.weights[flat][*start..start + elements].to_vec();
                    rank.machine.param_mut(*param).copy_from_slice(&weights);
                }
            }
        }
    }
}
