package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// push makes an image of files, or the stack of layers that tests use, and puts
// it into the node's registry.
func push() *cobra.Command {
	var dir string
	var files []string
	var stack int
	cmd := &cobra.Command{Use: "push REF", Short: "Push an image made of files, and print its full name", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		var layers [][]images.Entry
		if stack > 0 {
			layers = images.Stack(stack)
		}
		for _, f := range files {
			entry, err := fileEntry(f)
			if err != nil {
				return err
			}
			layers = append(layers, []images.Entry{entry})
		}
		if len(layers) == 0 {
			return errors.New("nothing to push: give --file or --stack")
		}
		image, err := images.Image(images.Config{}, layers...)
		if err != nil {
			return err
		}
		n, err := realnode.Attach(dir)
		if err != nil {
			return err
		}
		defer n.Close()
		if err := n.Push(cmd.Context(), args[0], image); err != nil {
			return err
		}
		fmt.Println(n.Ref(args[0]))
		return nil
	}}
	dirFlag(cmd, &dir)
	cmd.Flags().StringArrayVar(&files, "file", nil, "`PATH=SOURCE`: a layer with this file, executable if the source is (repeatable)")
	cmd.Flags().IntVar(&stack, "stack", 0, "`number` of layers with every kind of change between them")
	return cmd
}

func fileEntry(arg string) (images.Entry, error) {
	name, source, ok := strings.Cut(arg, "=")
	if !ok {
		return images.Entry{}, fmt.Errorf("--file %s: it is PATH=SOURCE", arg)
	}
	info, err := os.Stat(source)
	if err != nil {
		return images.Entry{}, err
	}
	entry := images.File(name, "", int64(info.Mode().Perm()))
	entry.Size = info.Size()
	entry.Content = func() io.Reader {
		file, err := os.Open(source)
		if err != nil {
			return failing{err}
		}
		return file
	}
	return entry, nil
}

// failing is a reader that has only an error.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
