package conf

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"github.com/agext/levenshtein"
)

// shape is what a value of the configuration may be. Keys are compared exactly;
// the TOML library alone would take RUN_DIR for run_dir.
type shape struct {
	kind string            // as kindOf says
	keys map[string]*shape // of a table with known keys
	each *shape            // of a table with any keys, of an array, of an array of tables
}

// configShape is the shape of a [Config].
var configShape = shapeOf(reflect.TypeFor[Config]())

// The kinds of values, in words.
const (
	kindTable  = "a table"
	kindTables = "an array of tables"
	kindArray  = "an array"
	kindString = "a string"
	kindInt    = "an integer"
	kindBool   = "a bool"
	kindFloat  = "a float"
	kindTime   = "a datetime"
	// kindDuration is a string, too.
	kindDuration = `a duration such as "2m"`
	// kindSize is one, too.
	kindSize = `a size such as "100GB" or "100GiB"`
)

// shapeOf returns the shape of a type that is made of the few kinds that a
// [Config] has.
func shapeOf(t reflect.Type) *shape {
	if t == reflect.TypeFor[time.Duration]() {
		return &shape{kind: kindDuration}
	}
	if t == reflect.TypeFor[Size]() {
		return &shape{kind: kindSize}
	}
	switch t.Kind() {
	case reflect.Struct:
		s := &shape{kind: kindTable, keys: map[string]*shape{}}
		for field := range t.Fields() {
			if key := field.Tag.Get("toml"); key != "-" {
				s.keys[key] = shapeOf(field.Type)
			}
		}
		return s
	case reflect.Map:
		return &shape{kind: kindTable, each: shapeOf(t.Elem())}
	case reflect.Slice:
		each := shapeOf(t.Elem())
		if each.kind == kindTable {
			return &shape{kind: kindTables, each: each}
		}
		return &shape{kind: kindArray, each: each}
	case reflect.Bool:
		return &shape{kind: kindBool}
	case reflect.Int:
		return &shape{kind: kindInt}
	default:
		return &shape{kind: kindString}
	}
}

// kindOf returns the kind of a decoded value.
func kindOf(value any) string {
	switch value := value.(type) {
	case map[string]any:
		return kindTable
	case []map[string]any:
		return kindTables
	case []any:
		if len(value) > 0 && !slices.ContainsFunc(value, func(v any) bool { return kindOf(v) != kindTable }) {
			return kindTables
		}
		return kindArray
	case string:
		return kindString
	case int64:
		return kindInt
	case bool:
		return kindBool
	case float64:
		return kindFloat
	default:
		return kindTime
	}
}

// fault is a key that must not be as it is.
type fault struct {
	line int
	text string
}

// document is a TOML text that has been decoded into primitives.
type document struct {
	text string
	md   *toml.MetaData
}

// check returns what in a document is not as s says.
func (s *shape) check(d *document, tree map[string]toml.Primitive) []fault {
	return s.checkTable(d, tree, nil, nil)
}

// checkTable checks a table, which is where the path leads, by keys and
// indexes; at is the path's keys.
func (s *shape) checkTable(d *document, table map[string]toml.Primitive, at toml.Key, path []any) []fault {
	var faults []fault
	for _, name := range slices.Sorted(maps.Keys(table)) {
		key, path, value := append(slices.Clone(at), name), append(slices.Clone(path), name), table[name]
		found := func(format string, args ...any) {
			faults = append(faults, fault{d.line(value, path), fmt.Sprintf(format, args...)})
		}
		var decoded any
		if err := d.md.PrimitiveDecode(value, &decoded); err != nil {
			found("key %q: %s", key, err)
			continue
		}
		want, ok := s.keys[name]
		if s.each != nil {
			want, ok = s.each, true
		}
		is := kindOf(decoded)
		if !ok {
			found("unknown key %q; did you mean %q?", key, nearest(key, is))
			continue
		}
		if text, ok := decoded.(string); ok && want.kind == kindDuration {
			if _, err := time.ParseDuration(text); err != nil {
				found("key %q must be %s, not %q", key, want.kind, text)
			}
			continue
		}
		if text, ok := decoded.(string); ok && want.kind == kindSize {
			if new(Size).UnmarshalText([]byte(text)) != nil {
				found("key %q must be %s, not %q", key, want.kind, text)
			}
			continue
		}
		if empty, _ := decoded.([]any); is != want.kind && (want.kind != kindTables || is != kindArray || len(empty) > 0) {
			found("key %q must be %s, not %s", key, want.kind, is)
			continue
		}
		switch want.kind {
		case kindTable:
			faults = append(faults, want.checkTable(d, subtable(d.md, value), key, path)...)
		case kindTables:
			for i, table := range subtables(d.md, value) {
				faults = append(faults, want.each.checkTable(d, table, key, append(slices.Clone(path), i))...)
			}
		case kindArray:
			for _, element := range decoded.([]any) { //nolint:forcetypeassert // its kind says so
				if is := kindOf(element); is != want.each.kind {
					found("key %q must be an array of %s only, not with %s", key, strings.TrimPrefix(want.each.kind, "a ")+"s", is)
					break
				}
			}
		}
	}
	return faults
}

// subtable returns the values of what is a table.
func subtable(md *toml.MetaData, value toml.Primitive) map[string]toml.Primitive {
	var table map[string]toml.Primitive
	_ = md.PrimitiveDecode(value, &table)
	return table
}

// subtables returns the values of what is an array of tables.
func subtables(md *toml.MetaData, value toml.Primitive) []map[string]toml.Primitive {
	var tables []map[string]toml.Primitive
	_ = md.PrimitiveDecode(value, &tables)
	return tables
}

// errHere is what a marker answers to being decoded, so that the library adds
// the position it otherwise keeps to itself.
var errHere = errors.New("here")

type marker struct{}

func (*marker) UnmarshalTOML(any) error { return errHere }

// line returns the line of the value where path leads, counted from 1. The
// library knows that of a key; it does not know it of a table without a line of
// its own, and of a key that is in several tables of an array it knows only the
// last. There it is the line with which the value begins to be there.
func (d *document) line(value toml.Primitive, path []any) int {
	isIndex := func(step any) bool { _, ok := step.(int); return ok }
	var at toml.ParseError
	if !slices.ContainsFunc(path, isIndex) && errors.As(d.md.PrimitiveDecode(value, &marker{}), &at) && at.Position.Line > 0 {
		return at.Position.Line
	}
	lines := strings.SplitAfter(d.text, "\n")
	for n := range lines {
		var tree map[string]any
		if _, err := toml.Decode(strings.Join(lines[:n+1], ""), &tree); err == nil && reaches(tree, path) {
			return n + 1
		}
	}
	return len(lines)
}

// reaches tells whether there is a value at path.
func reaches(value any, path []any) bool {
	for _, step := range path {
		switch step := step.(type) {
		case string:
			table, _ := value.(map[string]any)
			next, ok := table[step]
			if !ok {
				return false
			}
			value = next
		case int:
			tables := reflect.ValueOf(value)
			if tables.Kind() != reflect.Slice || step >= tables.Len() {
				return false
			}
			value = tables.Index(step).Interface()
		}
	}
	return true
}

// known is a key that there is.
type known struct {
	key   toml.Key
	shape *shape
}

// all returns every key of a shape below at. A table with any keys has the one
// that like names at its place.
func (s *shape) all(at, like toml.Key) []known {
	var keys []known
	add := func(name string, sub *shape) {
		key := append(slices.Clone(at), name)
		keys = append(append(keys, known{key, sub}), sub.all(key, like)...)
	}
	switch {
	case s.kind == kindTables:
		return s.each.all(at, like)
	case s.kind == kindTable && s.each != nil:
		name := "NAME"
		if len(like) > len(at)+1 && slices.Equal(like[:len(at)], at) {
			name = like[len(at)]
		}
		add(name, s.each)
	}
	for _, name := range slices.Sorted(maps.Keys(s.keys)) {
		add(name, s.keys[name])
	}
	return keys
}

// nearest returns the known key that takes the fewest edits to reach; for what
// is not a table, none that is one. A right name in the wrong table costs
// nothing.
func nearest(key toml.Key, kind string) string {
	isTable := kind == kindTable || kind == kindTables
	best, bestDistance := "", 0
	for _, k := range configShape.all(nil, key) {
		if (k.shape.kind == kindTable || k.shape.kind == kindTables) && !isTable {
			continue
		}
		d := levenshtein.Distance(strings.ToLower(key.String()), strings.ToLower(k.key.String()), nil)
		if key[len(key)-1] == k.key[len(k.key)-1] {
			d = 0
		}
		if best == "" || d < bestDistance {
			best, bestDistance = k.key.String(), d
		}
	}
	return best
}
