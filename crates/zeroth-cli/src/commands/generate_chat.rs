//! `generate` without a prompt: a conversation, with the turns typed at a terminal or read from a pipe line by line.

use std::io::{self, BufRead, IsTerminal, Read};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};
use zeroth::base::counted;
use zeroth::train::{End, Generation};

use super::generate_sampling::generation;
use super::generate_setup::{GenerateSetup, end_name};
use super::generate_stream::TextStream;
use crate::exit::Exit;
use crate::generate_flags::GenerateArgs;
use crate::output::{self, Output};
use crate::stop_signal::StopSignal;

/// Default number of new tokens of an answer.
const MAX_NEW_TOKENS: u64 = 512;
/// Default number of tokens of a conversation, unless the model has fewer positions.
const CONTEXT: u64 = 4096;
/// Longest line, in bytes.
const MAX_LINE: u64 = 1 << 20;

const HELP: &str = "/exit or Ctrl-D leaves, /clear forgets the conversation, /system TEXT sets its system message; \
                    Ctrl-C stops an answer";

pub(super) fn converse(
    setup: &GenerateSetup,
    arguments: &GenerateArgs,
    output: &Output,
) -> anyhow::Result<Exit> {
    let encoder = &setup.encoder;
    anyhow::ensure!(
        encoder.tokenizer_vocabulary().is_some(),
        "{} has no tokenizer.json: give tokens with --prompt-ids",
        arguments.model
    );
    let is_terminal = io::stdin().is_terminal();
    let mut next = None;
    if !is_terminal {
        next = read_line()?;
        anyhow::ensure!(
            next.is_some(),
            "no prompt: give one with --prompt, --prompt-file, --prompt-ids or --data, or the turns of a chat, one per \
             line, on standard input, which is empty"
        );
    }
    let is_chat = arguments.chat.unwrap_or_else(|| encoder.has_chat_template());
    anyhow::ensure!(
        is_chat || setup.system.is_none(),
        "--system needs a chat, but there is no chat template"
    );
    if !is_chat {
        output::note("note: without a chat template, lines are continued as plain text");
    }
    let wanted = arguments.max_length.unwrap_or(CONTEXT);
    let compiled = setup.model.compile_context(wanted, setup.run, setup.target)?;
    let context = compiled.program.cached_tokens;
    let max_new_tokens = arguments.max_new_tokens.unwrap_or(MAX_NEW_TOKENS);
    let generation = generation(&arguments.sampling, max_new_tokens, &setup.stops)?;
    let Some(mut generator) = setup.start(&compiled)? else { return Ok(Exit::DoesNotFit) };
    let mut conversation = Conversation { system: setup.system.clone(), turns: Vec::new(), is_chat };
    let interrupts = if is_terminal { Some(Interrupts::install()?) } else { None };
    if is_terminal {
        output::note(HELP);
    }
    let mut answers: Vec<Value> = Vec::new();
    loop {
        if is_terminal {
            output::ask("> ");
            next = read_line()?;
        }
        let Some(line) = next.take() else { break };
        match Input::of(&line, is_terminal) {
            Input::Exit => break,
            Input::Nothing => {}
            Input::Help => output::note(HELP),
            Input::Clear => conversation.turns.clear(),
            Input::System(text) if is_chat => conversation.system = text,
            Input::System(_) => output::note("note: without a chat template there is no system message"),
            Input::Text(text) => {
                conversation.turns.push(Turn { user: text.clone(), answer: String::new() });
                let ids = match conversation.fitted(setup, context, max_new_tokens) {
                    Ok(ids) => ids,
                    Err(error) if is_terminal => {
                        output::error(&error.to_string());
                        conversation.turns.pop();
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                let room = context - ids.len() as u64;
                let generation =
                    Generation { max_new_tokens: max_new_tokens.min(room), ..generation.clone() };
                let mut stream =
                    TextStream::new(encoder, &setup.stops, &arguments.sampling.stop, !output.is_json());
                if let Some(interrupts) = &interrupts {
                    interrupts.begin();
                }
                let turn = answers.len();
                let generated = generator.generate_reusing(&ids, turn, &generation, &mut |id| {
                    let is_interrupted = interrupts.as_ref().is_some_and(Interrupts::is_interrupted);
                    if is_interrupted { ControlFlow::Break(()) } else { stream.take(id) }
                });
                if let Some(interrupts) = &interrupts {
                    interrupts.end();
                }
                let generated = generated?;
                stream.end();
                let is_full = generated.end == End::Length && room < max_new_tokens;
                let end = if is_full { End::Positions } else { generated.end };
                let note = match end {
                    End::Length => Some(format!("(reached --max-new-tokens {max_new_tokens})")),
                    End::Positions => Some(format!("(the conversation has reached {context} tokens)")),
                    End::Stopped if !stream.is_cut() => Some("(stopped)".to_owned()),
                    End::Stop(_) | End::Stopped => None,
                };
                if let Some(note) = note {
                    output::note(&note);
                }
                let answer = stream.text();
                answers.push(json!({
                    "prompt": text, "prompt_ids": ids, "ids": generated.ids, "text": answer,
                    "end": if stream.is_cut() { "stop" } else { end_name(end) },
                }));
                if let Some(turn) = conversation.turns.last_mut() {
                    turn.answer = answer;
                }
            }
        }
        if !is_terminal {
            next = read_line()?;
        }
    }
    if is_terminal {
        output::ask("\n");
    }
    if output.is_json() {
        output::json(&json!({"turns": answers}))?;
    }
    Ok(Exit::Done)
}

/// A line of the user.
enum Input {
    Text(String),
    Nothing,
    Exit,
    Clear,
    Help,
    /// The new system message.
    System(Option<String>),
}

impl Input {
    /// Unknown commands are typing mistakes at a terminal, and text in a pipe.
    fn of(line: &str, is_terminal: bool) -> Self {
        let line = line.trim_end_matches(['\n', '\r']);
        let (word, rest) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
        match word {
            "" => Self::Nothing,
            "/exit" | "/quit" if rest.is_empty() => Self::Exit,
            "/clear" if rest.is_empty() => Self::Clear,
            "/help" if rest.is_empty() => Self::Help,
            "/system" => Self::System(Some(rest.trim().to_owned()).filter(|text| !text.is_empty())),
            word if is_terminal && word.starts_with('/') => Self::Help,
            _ => Self::Text(line.to_owned()),
        }
    }
}

/// The next line of standard input; `None` at its end.
fn read_line() -> anyhow::Result<Option<String>> {
    let mut line = Vec::new();
    io::stdin().lock().take(MAX_LINE + 1).read_until(b'\n', &mut line)?;
    anyhow::ensure!(
        line.len() as u64 <= MAX_LINE,
        "a line of standard input is longer than {MAX_LINE} bytes"
    );
    if line.is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8(line);
    Ok(Some(text.map_err(|_| anyhow::anyhow!("a line of standard input is not UTF-8 text"))?))
}

struct Turn {
    user: String,
    answer: String,
}

/// What was said so far.
struct Conversation {
    system: Option<String>,
    /// The last one has no answer yet while it is being answered.
    turns: Vec<Turn>,
    /// Whether it is rendered by a chat template, or plain text.
    is_chat: bool,
}

impl Conversation {
    fn ids(&self, setup: &GenerateSetup) -> anyhow::Result<Vec<i32>> {
        if !self.is_chat {
            let texts: Vec<String> =
                self.turns.iter().map(|turn| format!("{}{}", turn.user, turn.answer)).collect();
            return Ok(setup.encoder.prompt(&texts.join("\n"), None, false)?);
        }
        let mut messages: Vec<(&str, &str)> =
            self.system.iter().map(|system| ("system", system.as_str())).collect();
        let last = self.turns.len().saturating_sub(1);
        for (place, turn) in self.turns.iter().enumerate() {
            messages.push(("user", &turn.user));
            if place < last {
                messages.push(("assistant", &turn.answer));
            }
        }
        Ok(setup.encoder.chat(&messages)?)
    }

    /// The tokens of the conversation. The oldest turns are dropped until there is room for an answer.
    fn fitted(
        &mut self,
        setup: &GenerateSetup,
        context: u64,
        max_new_tokens: u64,
    ) -> anyhow::Result<Vec<i32>> {
        let room = max_new_tokens.min(context / 2);
        let mut dropped = 0;
        let ids = loop {
            let ids = self.ids(setup)?;
            if self.turns.len() == 1 || ids.len() as u64 + room <= context {
                break ids;
            }
            self.turns.remove(0);
            dropped += 1;
        };
        anyhow::ensure!(!ids.is_empty(), "the line has no tokens");
        anyhow::ensure!(
            (ids.len() as u64) < context,
            "the line has {} with its template, but a conversation has room for {context}: shorten it, or raise \
             --max-length",
            counted(ids.len() as u64, "token")
        );
        if dropped > 0 {
            let turns = counted(dropped, "turn");
            output::note(&format!(
                "note: the conversation is full: its oldest {turns} dropped (--max-length)"
            ));
        }
        Ok(ids)
    }
}

/// Ctrl-C at a terminal: it ends the answer that is being generated, and the process while none is or a second time.
struct Interrupts {
    interrupted: Arc<AtomicBool>,
    /// Whether the next one ends the process.
    leaves: Arc<AtomicBool>,
}

impl Interrupts {
    fn install() -> io::Result<Self> {
        let (interrupted, leaves) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        // Actions run in registration order: the first must not see what this signal sets.
        register_conditional_shutdown(
            SIGINT,
            i32::from(StopSignal::Interrupt.exit_code()),
            Arc::clone(&leaves),
        )?;
        register(SIGINT, Arc::clone(&interrupted))?;
        register(SIGINT, Arc::clone(&leaves))?;
        Ok(Self { interrupted, leaves })
    }

    fn begin(&self) {
        self.interrupted.store(false, Ordering::SeqCst);
        self.leaves.store(false, Ordering::SeqCst);
    }

    fn end(&self) {
        self.leaves.store(true, Ordering::SeqCst);
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::SeqCst)
    }
}
