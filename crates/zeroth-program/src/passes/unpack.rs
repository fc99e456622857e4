//! `unpack`: parameters in nf4 are unpacked right before every op that reads them.
//!
//! Keys: none; the parameter table says what is quantised.
//!
//! An unpacked parameter lives for one op of forward, recomputation or backward, so memory holds the copy of one parameter and
//! never that of a unit. It runs after the passes that move instructions: the op no longer reads the flat, its unpacking does.

use zeroth_graph::{Backward, Graph, ParamId};

use crate::{Action, Instruction, Program, Storage, Subject};

pub(super) fn unpack(mut program: Program, graph: &Graph, backward: &Backward) -> Program {
    let is_nf4 = |flat: usize| program.layout.flats[flat].storage == Storage::Nf4;
    if !(0..program.layout.flats.len()).any(is_nf4) {
        return program;
    }
    for section in &mut program.sections {
        let mut out = Vec::with_capacity(section.instructions.len());
        for mut instruction in section.instructions.drain(..) {
            let evaluated;
            let params: &[ParamId] = match (&instruction.action, instruction.action.subject()) {
                (Action::EvaluateLoss(node), _) => {
                    evaluated = graph.nodes[*node].evaluated();
                    &evaluated.params
                }
                (_, Subject::Node(node)) => &graph.nodes[node].params,
                (_, Subject::GradNode(node)) => &backward.nodes[node].params,
                (
                    _,
                    Subject::Value(_)
                    | Subject::Param(_)
                    | Subject::Flat(_)
                    | Subject::Chunk(_)
                    | Subject::Step,
                ) => &[],
            };
            for param in params {
                let (flat, _) = program.layout.place(*param);
                if program.layout.flats[flat].storage == Storage::Nf4 {
                    let unpack = Instruction::new(Action::Unpack(*param));
                    out.push(Instruction { reads: vec![flat], ..unpack });
                }
            }
            instruction.reads.retain(|flat| program.layout.flats[*flat].storage != Storage::Nf4);
            out.push(instruction);
        }
        section.instructions = out;
    }
    program
}
