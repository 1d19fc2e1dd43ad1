package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/storage"
)

func (a *app) gcCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Collect unused images in handlers' roots",
		Long: "Collect images that nobody uses in the roots of runtime handlers, as the daemon does by itself: above gc_high, least\n" +
			"recently used first until gc_low, and those not used for gc_max_age. Prints each image, why it goes or stays, and what\n" +
			"was freed. CRI-O's own root is kubelet's to collect. Works without the daemon, too; CRI-O has to be running where\n" +
			"something is to go.",
		Args: cobra.NoArgs,
	}
	output := outputFlag(cmd)
	handler := handlerFlag(cmd, "collect in the root of this runtime handler only")
	dryRun := cmd.Flags().Bool("dry-run", false, "say what would go, and remove nothing")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			result, err := store.Collect(cmd.Context(), *handler, *dryRun)
			if err != nil {
				return err
			}
			faults := result.Faults
			for _, c := range result.Collections {
				faults = append(faults, c.Faults...)
				if *output == "table" {
					if err := a.showCollection(c); err != nil {
						return err
					}
				}
			}
			if *output == "json" {
				if err := writeJSON(a.out, result); err != nil {
					return err
				}
			}
			for _, fault := range faults {
				fmt.Fprintln(a.err, "ocihold:", fault)
			}
			if len(faults) > 0 {
				return errors.New("not all could be collected")
			}
			return nil
		})
	}
	return cmd
}

// showCollection writes one root's collection for people.
func (a *app) showCollection(c storage.Collection) error {
	filled := "on the disk of CRI-O's root, whose marks are kubelet's"
	if c.Capacity > 0 {
		filled = fmt.Sprintf("%s of %s (%d%%) taken", size(c.Before), size(c.Capacity), 100*c.Before/c.Capacity)
	}
	fmt.Fprintf(a.out, "%s: %s, %s\n", c.Handler, c.Root, filled)
	rows := [][]string{{"IMAGE", "IMAGE ID", "SIZE", "UNUSED FOR", "ACTION", "WHY"}}
	gone := 0
	for _, image := range c.Images {
		action := "stays"
		if image.Goes {
			gone++
			action = "removed"
			if c.DryRun {
				action = "would go"
			}
		}
		rows = append(rows, []string{
			allNames(image.Names), short(image.ID), size(image.Bytes),
			units.HumanDuration(time.Since(image.LastUsed)), action, image.Why,
		})
	}
	if err := writeTable(a.out, rows); err != nil {
		return err
	}
	freed := "freed"
	if c.DryRun {
		freed = "would free"
	}
	fmt.Fprintf(a.out, "%s %s: %d images, %d layers without an image, %s of downloads\n", freed, size(c.Freed+c.Blobs), gone, len(c.Layers), size(c.Blobs))
	return nil
}
