package conf

import (
	"errors"
	"fmt"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/agext/levenshtein"
)

// parse overrides c by what text says. All unknown keys and wrong types are
// reported at once, each as "file:line: fault".
func (c *Config) parse(file, text string) error {
	var tree map[string]toml.Primitive
	got, err := toml.Decode(text, &tree)
	if err != nil {
		return inFile(file, err)
	}
	known, err := knownKeys()
	if err != nil {
		return err
	}
	var faults []error
	refused := map[string]bool{}
	for _, key := range got.Keys() {
		if isWithin(refused, key) {
			continue
		}
		fault := keyFault(key, got, known)
		if fault == "" {
			continue
		}
		refused[key.String()] = true
		faults = append(faults, fmt.Errorf("%s:%d: %s", file, line(&got, tree, key), fault))
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	if _, err := toml.Decode(text, c); err != nil {
		return inFile(file, err)
	}
	return nil
}

// knownKeys returns the keys and types of a Config: those of the default
// one, written down.
func knownKeys() (toml.MetaData, error) {
	text, err := toml.Marshal(Default())
	if err != nil {
		return toml.MetaData{}, fmt.Errorf("encode default configuration: %w", err)
	}
	var tree map[string]any
	known, err := toml.Decode(string(text), &tree)
	if err != nil {
		return toml.MetaData{}, fmt.Errorf("decode default configuration: %w", err)
	}
	return known, nil
}

// keyFault says what is wrong with a key, or nothing. Keys are compared exactly;
// the decoder alone would take RUN_DIR for run_dir.
func keyFault(key toml.Key, got, known toml.MetaData) string {
	if !known.IsDefined(key...) {
		return fmt.Sprintf("unknown key %q; did you mean %q?", key, nearest(key, got, known))
	}
	want, is := known.Type(key...), got.Type(key...)
	if want != is {
		return fmt.Sprintf("key %q must be %s, not %s", key, typeName(want), typeName(is))
	}
	return ""
}

// isWithin tells whether key or a table that it is in was refused already.
func isWithin(refused map[string]bool, key toml.Key) bool {
	for n := range key {
		if refused[key[:n+1].String()] {
			return true
		}
	}
	return false
}

// nearest returns the known key that takes the fewest edits to reach; for what
// is not a table, none that is one. A right name in the wrong table costs
// nothing.
func nearest(key toml.Key, got, known toml.MetaData) string {
	_, isTable := tableTypes[got.Type(key...)]
	best, bestDistance := "", 0
	for _, k := range known.Keys() {
		if _, ok := tableTypes[known.Type(k...)]; ok && !isTable {
			continue
		}
		d := levenshtein.Distance(strings.ToLower(key.String()), strings.ToLower(k.String()), nil)
		if key[len(key)-1] == k[len(k)-1] {
			d = 0
		}
		if best == "" || d < bestDistance {
			best, bestDistance = k.String(), d
		}
	}
	return best
}

// tableTypes are the TOML library's names of tables, in words.
var tableTypes = map[string]string{"Hash": "a table", "ArrayHash": "an array of tables"}

// typeName puts the TOML library's name of a type into words.
func typeName(t string) string {
	if words, ok := tableTypes[t]; ok {
		return words
	}
	switch t {
	case "Array", "Integer":
		return "an " + strings.ToLower(t)
	default:
		return "a " + strings.ToLower(t)
	}
}

// errHere is what a marker answers to being decoded, so that the library adds
// the position it otherwise keeps to itself.
var errHere = errors.New("here")

type marker struct{}

func (*marker) UnmarshalTOML(any) error { return errHere }

// line returns the line of a key, counted from 1.
func line(md *toml.MetaData, tree map[string]toml.Primitive, key toml.Key) int {
	last := len(key) - 1
	for _, name := range key[:last] {
		var table map[string]toml.Primitive
		if err := md.PrimitiveDecode(tree[name], &table); err != nil {
			return 0
		}
		tree = table
	}
	var at toml.ParseError
	errors.As(md.PrimitiveDecode(tree[key[last]], &marker{}), &at)
	return at.Position.Line
}

// inFile adds the file, and the line where the error tells it apart, to an
// error of the TOML library.
func inFile(file string, err error) error {
	if at, ok := errors.AsType[toml.ParseError](err); ok {
		// The library counts a line too few where the text ends in an escape.
		return fmt.Errorf("%s:%d: %s", file, max(1, at.Position.Line), at.Message)
	}
	return fmt.Errorf("%s: %w", file, err)
}
