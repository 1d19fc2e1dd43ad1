package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/storage"
)

func (a *app) diskUseCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "df",
		Short: "Tell what images take of the disks, root by root",
		Long: "Tell what the images in CRI-O's root and the handlers' roots take of the disks, as allocated there.\n" +
			"SIZE counts each layer once, SHARED those that several images of the root have. RECLAIMABLE is what goes when every image\n" +
			"goes that is not in use. LEASED counts the images held for volumes, LEANING those of CRI-O's root that need layers of this\n" +
			"root, IN TWO ROOTS those that are in CRI-O's root and a handler's: CRI-O runs its own copy. --tree names the images.\n" +
			"SCRATCH is the directory on whose disk writable volumes have what is written, and AT MOST what they could grow to.\n" +
			"Works without the daemon, too.",
		Args: cobra.NoArgs,
	}
	output := outputFlag(cmd)
	tree := cmd.Flags().Bool("tree", false, "show each file system with its roots and their images")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if *tree && *output == "json" {
			return errors.New("--tree is for people: leave it out, -o json has the images too")
		}
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			use, err := store.DiskUse(cmd.Context())
			if err != nil {
				return err
			}
			if *output == "json" {
				return writeJSON(a.out, use)
			}
			for _, fault := range use.Faults {
				fmt.Fprintln(a.err, "ocihold:", fault)
			}
			if *tree {
				return writeDiskTree(a.out, use)
			}
			return errors.Join(writeTable(a.out, diskRows(use)), writeScratch(a.out, use.Scratch))
		})
	}
	return cmd
}

func diskRows(use control.DiskUse) [][]string {
	rows := [][]string{{
		"HANDLER", "ROOT", "FILE SYSTEM", "CAPACITY", "AVAILABLE", "IMAGES", "SIZE", "SHARED", "RECLAIMABLE", "LEASED", "LEANING", "IN TWO ROOTS",
	}}
	for _, root := range use.Roots {
		leased, twice := 0, 0
		for _, image := range root.Images {
			if image.Leased {
				leased++
			}
			if image.InTwoRoots {
				twice++
			}
		}
		rows = append(rows, []string{
			root.Handler, root.Root, fmt.Sprintf("%s (%s)", root.FileSystem.Mountpoint, root.FileSystem.Device),
			size(root.FileSystem.Capacity), size(root.FileSystem.Available), fmt.Sprint(len(root.Images)),
			size(root.Bytes), size(root.SharedBytes), size(root.ReclaimableBytes),
			fmt.Sprint(leased), fmt.Sprint(len(root.Leaning)), fmt.Sprint(twice),
		})
	}
	return rows
}

// writeScratch writes what writable volumes take, if there are any.
func writeScratch(w io.Writer, use control.Scratch) error {
	if use.Volumes == 0 {
		return nil
	}
	fmt.Fprintln(w)
	return writeTable(w, [][]string{
		{"SCRATCH", "VOLUMES", "SIZE", "AT MOST"},
		{use.Directory, fmt.Sprint(use.Volumes), size(use.Bytes), size(use.PromisedBytes)},
	})
}

func size(bytes uint64) string { return units.HumanSize(float64(bytes)) }

// branch is a line of a tree, with those below it.
type branch struct {
	text  string
	below []branch
}

// writeDiskTree writes file systems, the roots on each, and their images.
func writeDiskTree(w io.Writer, use control.DiskUse) error {
	var disks []branch
	var mountpoints []string
	var taken []uint64
	for _, root := range use.Roots {
		fs := root.FileSystem
		at := slices.Index(mountpoints, fs.Mountpoint)
		if at < 0 {
			at = len(disks)
			mountpoints, taken, disks = append(mountpoints, fs.Mountpoint), append(taken, 0), append(disks, branch{})
		}
		taken[at] += root.Bytes
		disks[at].text = fmt.Sprintf("%s (%s, %s): %s, %s available, %s of images",
			fs.Mountpoint, fs.Type, fs.Device, size(fs.Capacity), size(fs.Available), size(taken[at]))
		disks[at].below = append(disks[at].below, rootBranch(root))
	}
	var lines strings.Builder
	for _, disk := range disks {
		lines.WriteString(disk.text + "\n")
		writeBranches(&lines, "", disk.below)
	}
	if _, err := io.WriteString(w, lines.String()); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}

func rootBranch(root storage.RootUsage) branch {
	b := branch{text: fmt.Sprintf("%s %s: %s, %s shared, %s reclaimable",
		root.Handler, root.Root, size(root.Bytes), size(root.SharedBytes), size(root.ReclaimableBytes))}
	for _, image := range root.Images {
		text := fmt.Sprintf("%s %s: %s, %s its own", imageName(image.Names, "<none>"), short(image.ID), size(image.Bytes), size(image.OwnBytes))
		if image.Leased {
			text += ", leased"
		}
		if image.Used {
			text += ", in use"
		}
		if len(image.LeansOn) > 0 {
			text += ", leans on " + strings.Join(image.LeansOn, ", ")
		}
		if image.InTwoRoots {
			text += ", in two roots"
		}
		b.below = append(b.below, branch{text: text})
	}
	for _, name := range root.Leaning {
		b.below = append(b.below, branch{text: name + " of CRI-O's root leans on this root"})
	}
	return b
}

func writeBranches(w *strings.Builder, indent string, branches []branch) {
	for i, b := range branches {
		fork, under := "├── ", "│   "
		if i == len(branches)-1 {
			fork, under = "└── ", "    "
		}
		w.WriteString(indent + fork + b.text + "\n")
		writeBranches(w, indent+under, b.below)
	}
}
