//! `--config FILE`: flags of `train` in a YAML or JSON file.
//!
//! The file's flags are put before the typed ones, so that a typed flag, which is the last, counts. Each is checked on the
//! way, with the parser of its flag, so that an error names the place in the file.

mod yaml;

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::OnceLock;

use clap::{Arg, Command};

use self::yaml::{Member, YamlLocation, YamlValue};
use crate::flag_names::{Subcommand, spellings};
use crate::parse_errors::value_error;

/// The largest run file: flags fill a page, not a book.
const MAX_BYTES: u64 = 1 << 20;

/// Flags of which only one can be given: a typed one replaces all of them in the file.
const ALTERNATIVES: [&[&str]; 2] =
    [&["bf16", "fp16", "fp32", "torch-dtype"], &["warmup-steps", "warmup-ratio"]];

/// The arguments of this process, run files included.
static ARGUMENTS: OnceLock<Vec<String>> = OnceLock::new();

/// Keeps the arguments for the ranks that this process starts: the file may change until they read it.
pub(crate) fn keep(arguments: &[String]) {
    let _ = ARGUMENTS.set(arguments.to_vec());
}

/// The arguments for a rank, without the program.
pub(crate) fn for_ranks() -> impl Iterator<Item = &'static String> {
    ARGUMENTS.get().into_iter().flatten().skip(1)
}

/// Puts the flags of the file that `--config` names behind the command. Unchanged without one; the errors are all that the
/// file has.
pub(crate) fn expand(root: &Command, typed: Vec<String>) -> Result<Vec<String>, Vec<String>> {
    let subcommand = Subcommand::find(root, &typed);
    let word = match subcommand.name.as_str() {
        "zeroth train" => "train",
        "zeroth config resolve" => "resolve",
        _ => return Ok(typed),
    };
    let Some(path) = config_path(&typed) else { return Ok(typed) };
    let train = root.find_subcommand("train").expect("`train` is a command of this program");
    let path = Path::new(&path);
    let name = path.display().to_string();
    let members = read(path).map_err(|error| vec![error])?;
    let file = RunFile { name, train, resolve: (word == "resolve").then_some(subcommand) };
    let flags = file.flags(&members, &typed)?;
    let at = typed.iter().position(|typed| typed == word).map_or(typed.len(), |at| at + 1);
    let mut all = typed;
    all.splice(at..at, flags);
    Ok(all)
}

/// The value of the last `--config`; `None` without one or without its value, which the parser reports.
fn config_path(typed: &[String]) -> Option<String> {
    let at = typed.iter().rposition(|token| token == "--config" || token.starts_with("--config="))?;
    match typed[at].strip_prefix("--config=") {
        Some(path) => Some(path.to_owned()),
        None => typed.get(at + 1).filter(|path| !path.starts_with("--")).cloned(),
    }
}

fn read(path: &Path) -> Result<Vec<Member>, String> {
    let name = path.display();
    let cannot = |error: &dyn std::fmt::Display| format!("--config {name}: cannot read it: {error}");
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| cannot(&error))?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| cannot(&error))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("--config {name}: the file has more than 1 MiB; a run file holds flags"));
    }
    let text = String::from_utf8(bytes).map_err(|_| format!("--config {name}: the file is not UTF-8"))?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let root = yaml::read(text).map_err(|error| {
        format!("{name}: {}: {}; a run file is YAML or JSON", error.location, error.message)
    })?;
    match root {
        None => {
            Err(format!("--config {name}: the file is empty; it holds flags, as in `learning_rate: 1e-5`"))
        }
        Some(node) => match node.value {
            YamlValue::Object(members) => Ok(members),
            other => Err(format!(
                "{name}: {}: this is {}; a run file is an object of flags, as in `learning_rate: 1e-5`",
                node.location,
                other.kind()
            )),
        },
    }
}

/// A run file, to be turned into flags.
struct RunFile<'a> {
    name: String,
    train: &'a Command,
    /// `config resolve`, which reads only some of train's flags.
    resolve: Option<Subcommand<'a>>,
}

impl RunFile<'_> {
    fn flags(&self, members: &[Member], typed: &[String]) -> Result<Vec<String>, Vec<String>> {
        let typed: Vec<&Arg> = typed.iter().filter_map(|token| self.argument(flag_name(token)?)).collect();
        let (mut flags, mut errors) = (Vec::new(), Vec::new());
        let mut seen: Vec<(&str, YamlLocation)> = Vec::new();
        for member in members {
            let argument = match self.known(member) {
                Ok(argument) => argument,
                Err(error) => {
                    errors.push(error);
                    continue;
                }
            };
            let id = argument.get_long().unwrap_or_default();
            if let Some((_, first)) = seen.iter().find(|(other, _)| *other == id) {
                let key = &member.key;
                errors.push(
                    self.at(
                        member.location,
                        &format!("`{key}` is there already, in {first}: keep one of them"),
                    ),
                );
                continue;
            }
            seen.push((id, member.location));
            match self.tokens(argument, member) {
                Ok(tokens) if !is_replaced(id, &typed) && self.reads(id) => flags.extend(tokens),
                Ok(_) => {}
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() { Ok(flags) } else { Err(errors) }
    }

    /// Whether the command reads the flag.
    fn reads(&self, id: &str) -> bool {
        self.resolve.as_ref().is_none_or(|resolve| resolve.spellings(id).is_some())
    }

    fn at(&self, location: YamlLocation, message: &str) -> String {
        format!("{}: {location}: {message}", self.name)
    }

    fn argument(&self, name: &str) -> Option<&Arg> {
        let name = name.replace('_', "-");
        self.train.get_arguments().find(|argument| spellings(argument).contains(&name))
    }

    /// The flag of a key.
    fn known(&self, member: &Member) -> Result<&Arg, String> {
        let key = &member.key;
        match self.argument(key) {
            Some(argument) if argument.get_long() == Some("config") => {
                Err(self.at(member.location, "a run file cannot name another one: leave `config` out"))
            }
            Some(argument) => Ok(argument),
            None => {
                let of_train = Subcommand::of(self.train, "zeroth train");
                let (message, _) = of_train.unknown(key);
                // As a key, without the dashes of a flag.
                let message =
                    message.replace("has no flag --", "has no flag for the key ").replace("`--", "`");
                Err(self.at(member.location, &message))
            }
        }
    }

    /// The flag with its value, checked by the flag's own parser.
    fn tokens(&self, argument: &Arg, member: &Member) -> Result<Vec<String>, String> {
        let (key, node) = (&member.key, &member.node);
        let long = argument.get_long().unwrap_or_default();
        // As the key says it: a name that only one trainer has tells whose file it is.
        let flag = if self.resolve.is_some() { long.to_owned() } else { key.replace('_', "-") };
        let flag = format!("--{flag}");
        let takes_object = long == "deepspeed" || long.ends_with("-kwargs");
        if node.value.is_null() {
            return Ok(Vec::new());
        }
        let takes_many = argument.get_num_args().is_some_and(|range| range.max_values() > 1);
        let is_switch = argument.is_require_equals_set();
        let tokens = match &node.value {
            YamlValue::Scalar { text, .. } if is_switch => {
                vec![format!("{flag}={}", text.to_ascii_lowercase())]
            }
            YamlValue::Scalar { text, .. } if takes_many => vec![flag, text.clone()],
            YamlValue::Scalar { text, .. } => vec![format!("{flag}={text}")],
            YamlValue::List(nodes) if takes_many && !is_switch => {
                let mut tokens = vec![flag];
                for node in nodes {
                    let YamlValue::Scalar { text, .. } = &node.value else {
                        let kind = node.value.kind();
                        let message = format!("`{key}` holds {kind} in its list; it takes single values");
                        return Err(self.at(node.location, &message));
                    };
                    tokens.push(text.clone());
                }
                if tokens.len() == 1 {
                    return Err(self.at(node.location, &format!("`{key}` is an empty list: leave it out")));
                }
                tokens
            }
            // Flags that take JSON.
            YamlValue::Object(_) if takes_object => {
                vec![format!("{flag}={}", node.value.to_json())]
            }
            other => {
                let takes = match (is_switch, takes_many) {
                    (true, _) => "true or false",
                    (false, true) => "a single value or a list of them",
                    (false, false) => "a single value",
                };
                let message = format!("`{key}` holds {}; it takes {takes}", other.kind());
                return Err(self.at(node.location, &message));
            }
        };
        let alone = Command::new("zeroth").arg(argument.clone().required(false));
        let parsed =
            alone.try_get_matches_from(std::iter::once("zeroth").chain(tokens.iter().map(String::as_str)));
        match parsed {
            Ok(_) => Ok(tokens),
            Err(error) => {
                let value = if let YamlValue::Scalar { text, .. } = &node.value { text } else { "" };
                let message = value_error(&error, &spellings(argument), value);
                Err(self.at(node.location, &format!("`{key}`: {message}")))
            }
        }
    }
}

/// Whether a typed flag replaces the file's.
fn is_replaced(id: &str, typed: &[&Arg]) -> bool {
    let is_typed = |name: &str| typed.iter().any(|argument| argument.get_long() == Some(name));
    let group = ALTERNATIVES.iter().find(|group| group.contains(&id));
    is_typed(id) || group.is_some_and(|group| group.iter().any(|name| is_typed(name)))
}

fn flag_name(token: &str) -> Option<&str> {
    let flag = token.strip_prefix("--")?;
    Some(flag.split_once('=').map_or(flag, |(name, _)| name))
}
