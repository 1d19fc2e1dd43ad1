package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// format is the value of -o.
type format string

func (f *format) String() string { return string(*f) }

func (f *format) Set(s string) error {
	if s != "table" && s != "json" {
		return fmt.Errorf("%q is not an output format: use table or json", s)
	}
	*f = format(s)
	return nil
}

func (f *format) Type() string { return "format" }

func outputFlag(cmd *cobra.Command) *format {
	f := format("table")
	cmd.Flags().VarP(&f, "output", "o", "output format: table or json")
	return &f
}

func writeJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

func writeTable(w io.Writer, rows [][]string) error {
	table := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	for _, row := range rows {
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	if err := table.Flush(); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

// short cuts an image ID to what people compare.
func short(id string) string { return id[:min(12, len(id))] }
